"""Tiny tokenizers, models and data sets, built in memory: the tests need no network.

    tokenizer = tiny_tokenizer()                     # plain text; eos "<eos>", pad "<pad>"
    tokenizer = tiny_tokenizer(chat=True)            # ChatML template; eos "<|im_end|>"
    tokenizer = tiny_tokenizer(chat="generation")    # the same with {% generation %} markers
    model = tiny_model("gemma2")                     # fp32, random weights, same vocabulary
    dataset = tiny_dataset("prompt_completion")      # 16 rows of any form that SFTTrainer takes
    path = save_tiny_model(folder, "qwen2")          # model and tokenizer, for string model ids

Everything is deterministic: the same call gives the same weights, ids and rows in every process.
A new object is returned each time, since trainers write to all three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# ---------------------------------------------------------------------------------------- text

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|other|>"]

QUESTIONS_AND_ANSWERS = [
    ("What is better than ugly?", "Beautiful."),
    ("What is better than implicit?", "Explicit."),
    ("Two and two?", "Four, as two and two have been in every village that ever counted sheep."),
    ("Where do the cats sleep in the long winter?", "Near the stove."),
    ("Name a color of the sky.", "Blue by day, red at dusk and black by night."),
    ("Why?", "Because."),
    ("How many legs has a spider, and how many has an ant?", "Eight and six."),
    (
        "Say something long, please.",
        "A long answer has many words, and then a few words more. " * 2,
    ),
    ("What is the capital of France?", "Paris."),
    ("Is naïve spelled with two dots?", "Yes: naïve — and café has an accent."),
    ("List three fruits.", "Apple, pear, plum."),
    ("Who wrote this?", "Nobody in particular."),
]

# ----------------------------------------------------------------------------------- tokenizers

_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- set body = (message['content'] or '')
    + ((message['tool_calls'] | tojson) if message['tool_calls'] else '') %}
{%- if message['role'] == 'assistant' %}ASSISTANT{%- else %}{{- body + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

#: ChatML, with `tools` and `tool_calls`; it says nothing about which tokens the assistant wrote.
CHATML = _TEMPLATE.replace("ASSISTANT", "{{- body + '<|im_end|>' }}")

#: The same text, the assistant's answer and its end-of-turn token between `{% generation %}` marks.
CHATML_GENERATION = _TEMPLATE.replace(
    "ASSISTANT", "{%- generation %}{{- body + '<|im_end|>' }}{%- endgeneration %}"
)


def byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special: Iterable[str] = (), split: Any = None
) -> Tokenizer:
    """Return a byte-level BPE trained on `texts`, which `split` cuts into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@cache
def _tokenizer_json() -> str:
    """60 or so merges, of the sentences above."""
    texts = [text for pair in QUESTIONS_AND_ANSWERS for text in pair]
    return byte_level_bpe(texts, VOCAB_SIZE, SPECIAL_TOKENS).to_str()


def tiny_tokenizer(
    chat: bool | str = False,
    *,
    bos: bool = False,
    eos: str | None = None,
    pad: str | None = "<pad>",
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 320 ids: exact offsets; `decode(encode(text)) == text`.

    `chat`: False, True (ChatML) or "generation" (ChatML with generation marks). `bos=True` puts
    `<bos>` before every text, as Llama's tokenizer does. `eos` defaults to `<eos>`, with a chat
    template to `<|im_end|>`. `pad=None` leaves the tokenizer without a padding token.
    """
    backend = Tokenizer.from_str(_tokenizer_json())
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A <bos> $B",
            special_tokens=[("<bos>", backend.token_to_id("<bos>"))],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>" if bos else None,
        eos_token=eos or ("<|im_end|>" if chat else "<eos>"),
        pad_token=pad,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    if chat:
        tokenizer.chat_template = CHATML_GENERATION if chat == "generation" else CHATML
    return tokenizer


# --------------------------------------------------------------------------------------- models

VOCAB_SIZE = 320
WINDOW = 8

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    # ten times the usual 0.02: so small a model must still attend to something, or nothing leaks
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2}
SHAPE = _COMMON | _SIZE | {"intermediate_size": 64, "max_position_embeddings": 512}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED_EXPERTS = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1}
_ROUTED_EXPERTS |= {"n_group": 1, "topk_group": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 128}
_MAMBA_2 = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}

#: The architectures that must run packed, without a fallback.
PACKED_MODELS = [
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "gpt2")
]


def _dropout(share: float) -> dict[str, Any]:
    return dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), share)


def _shape_without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in SHAPE.items() if key not in names}


#: model type, or gpt2_dropout → arguments of its config
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": SHAPE | {"sliding_window": WINDOW},
    "qwen2": _shape_without("head_dim"),
    "qwen3": SHAPE,
    "qwen3_moe": SHAPE | _EXPERTS | {"num_experts": 4},
    "gemma2": SHAPE | _SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": SHAPE | _SLIDING | {"query_pre_attn_scalar": 8},
    "gpt_oss": {
        **SHAPE,
        **_SLIDING,
        "rope_parameters": _YARN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt2": _GPT2 | _dropout(0.0),
    "gpt2_dropout": _GPT2 | _dropout(0.1),
    # calls past its backbone
    "opt": _shape_without("head_dim", "num_key_value_heads")
    | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    # the other text models that TRL's own tests train
    "gpt_neox": _shape_without("head_dim", "num_key_value_heads"),
    "cohere2": _shape_without("head_dim") | _SLIDING | {"logit_scale": 0.5},
    "olmo3": _shape_without("head_dim") | _SLIDING,
    "glm4_moe": SHAPE | _ROUTED_EXPERTS | {"first_k_dense_replace": 1},
    "deepseek_v3": {
        **_shape_without("head_dim"),
        **_ROUTED_EXPERTS,
        **_LATENT,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
    # recurrent or convolutional layers, which run on past the end of a document
    "lfm2": _shape_without("head_dim") | {"layer_types": ["conv", "full_attention"]},
    "falcon_mamba": _COMMON | _SIZE | {"state_size": 4},
    "nemotron_h": {
        **_shape_without("num_hidden_layers"),
        **_ROUTED_EXPERTS,
        **_MAMBA_2,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "moe_shared_expert_intermediate_size": 32,
    },
}


def tiny_config(name: str = "llama", **overrides: Any) -> PretrainedConfig:
    """The config of `tiny_model(name)`. `overrides` are arguments of the architecture's config."""
    return AutoConfig.for_model(name.removesuffix("_dropout"), **MODELS[name] | overrides)


def tiny_model(
    name: str = "llama",
    *,
    seed: int = 0,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """A causal LM with 2 layers of width 32 and random weights (a key of `MODELS`).

    The same seed gives the same weights; the global random state is left as it was. The model is
    in eval mode, as from `from_pretrained`. `overrides` go to the config.
    """
    if name == "gemma2" and attn_implementation is None:
        attn_implementation = "eager"  # before transformers 5.21 sdpa, which drops the soft-cap
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kwargs = {"attn_implementation": attn_implementation} if attn_implementation else {}
        model = AutoModelForCausalLM.from_config(
            tiny_config(name, **overrides), dtype=dtype, **kwargs
        )
    return model.eval()


def save_tiny_model(
    path: str | Path, name: str = "qwen2", *, chat: bool | str = True, **overrides: Any
) -> str:
    """Save model and tokenizer below `path` and return the folder: a model id without a hub."""
    folder = Path(path) / f"tiny-{name}"
    tiny_model(name, **overrides).save_pretrained(folder)
    tiny_tokenizer(chat).save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------ data sets


def _pairs(rows: int) -> list[tuple[str, str]]:
    return [QUESTIONS_AND_ANSWERS[i % len(QUESTIONS_AND_ANSWERS)] for i in range(rows)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _turns(i: int, question: str, answer: str) -> list[dict[str, Any]]:
    """One exchange; every third conversation has a second one."""
    turns = [user(question), assistant(answer)]
    return [*turns, user("Are you sure?"), assistant("Quite sure.")] if i % 3 == 2 else turns


def _tokenized(rows: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids with eos)"""
    tokenizer = tiny_tokenizer()
    return [
        (tokenizer(q + " ")["input_ids"], tokenizer(a + "<eos>")["input_ids"])
        for q, a in _pairs(rows)
    ]


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _tool_row(i: int, question: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    return {
        "messages": [
            {"role": "user", "content": question, "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": f"{i} degrees", "tool_calls": None},
            {"role": "assistant", "content": f"It is {i} degrees.", "tool_calls": None},
        ],
        "tools": [WEATHER_TOOL],
    }


def _image_rows(rows: int) -> list[dict[str, Any]]:
    """One 16 × 16 picture of a single color a row."""
    from PIL import Image

    return [
        {
            "messages": [user(f"What is number {i}?"), assistant(a)],
            "images": [Image.new("RGB", (16, 16), (16 * i % 256, 100, 50))],
        }
        for i, (_, a) in enumerate(_pairs(rows))
    ]


def _packed(rows: int) -> list[dict[str, list[int]]]:
    """Two documents a row, prompts masked: what TRL's own packing would have written."""
    documents = _tokenized(2 * rows)
    return [
        {
            "input_ids": p1 + c1 + p2 + c2,
            "labels": [-100] * len(p1) + c1 + [-100] * len(p2) + c2,
            "seq_lengths": [len(p1 + c1), len(p2 + c2)],
        }
        for (p1, c1), (p2, c2) in zip(documents[::2], documents[1::2], strict=True)
    ]


#: form → rows; each takes the number of rows and returns a list of dictionaries
FORMS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    # plain text
    "language_modeling": lambda n: [{"text": f"{q} {a}"} for q, a in _pairs(n)],
    "prompt_completion": lambda n: [{"prompt": f"{q} ", "completion": a} for q, a in _pairs(n)],
    "question_answer": lambda n: [{"question": q, "answer": a} for q, a in _pairs(n)],
    # conversations
    "conversational_language_modeling": lambda n: [
        {"messages": _turns(i, q, a)} for i, (q, a) in enumerate(_pairs(n))
    ],
    "conversational_prompt_completion": lambda n: [
        {"prompt": [user(q)], "completion": [assistant(a)]} for q, a in _pairs(n)
    ],
    "conversations": lambda n: [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in _pairs(n)
    ],
    "tools": lambda n: [_tool_row(i, q) for i, (q, _) in enumerate(_pairs(n))],
    # tokens
    "tokenized": lambda n: [{"input_ids": p + c} for p, c in _tokenized(n)],
    "tokenized_labels": lambda n: [
        {"input_ids": p + c, "labels": [-100] * len(p) + c} for p, c in _tokenized(n)
    ],
    "tokenized_completion_mask": lambda n: [
        {"input_ids": p + c, "completion_mask": [0] * len(p) + [1] * len(c)}
        for p, c in _tokenized(n)
    ],
    "tokenized_assistant_masks": lambda n: [
        {"input_ids": p + c, "assistant_masks": [0] * len(p) + [1] * len(c)}
        for p, c in _tokenized(n)
    ],
    "packed": _packed,
    # pictures (needs pillow)
    "images": _image_rows,
}


def tiny_rows(form: str, rows: int = 16) -> list[dict[str, Any]]:
    """The rows of `tiny_dataset(form, rows)` as a list of dictionaries."""
    return FORMS[form](rows)


def tiny_dataset(form: str = "language_modeling", rows: int = 16) -> Dataset:
    """A data set of the given form (a key of `FORMS`)."""
    return Dataset.from_list(tiny_rows(form, rows))


def tiny_iterable(form: str = "language_modeling", rows: int = 16) -> IterableDataset:
    """The same rows as an `IterableDataset` that knows its columns."""
    return tiny_dataset(form, rows).to_iterable_dataset()


def documents_of_lengths(
    lengths: Iterable[int], *, prompt: int = 0, seed: int = 0
) -> list[dict[str, list[int]]]:
    """Pre-tokenized rows with exactly these lengths: random ids, the first `prompt` labels −100."""
    draw = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=draw).tolist()
        documents.append({"input_ids": ids, "labels": [-100] * min(prompt, length) + ids[prompt:]})
    return documents
