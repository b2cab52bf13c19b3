"""Chat templates of TRL's families and published formats, and conversations to render with them.

tokenizer_for("qwen3")       a tokenizer with the template and its special tokens
FORMATS["qwen3"].written     what a turn of the assistant is, from its content
conversations(system=True)   a strategy of hypothesis
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import byte_level_bpe
from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.row_format import RowFormat
from trl_packing.data.tokenize_rows import documents_from_rows

SHIPPED = Path(trl.__file__).parent / "chat_templates"

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] +
'<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}\
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}\
{% for message in rest %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + ((system if loop.first else '') + message['content']).strip() +
' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

ALPACA = """\
{% for message in messages %}{% if message['role'] == 'assistant' %}\
{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% else %}\
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""

WRITTEN = {"chatml": CHATML, "llama 2": LLAMA_2, "alpaca": ALPACA}


@dataclass(frozen=True)
class Format:
    """The trained part of a turn: `written`, from its content and whether it is the last one."""

    written: Callable[[str, bool], str]
    system: bool = True  # whether it takes a system message


def ends(stop: str, trim: Callable[[str], str] = str) -> Callable[[str, bool], str]:
    return lambda content, last: trim(content) + stop


def llama2(content: str, last: bool) -> str:  # no generation prompt has the space
    return " " + content.strip() + " </s>"


def qwen3(content: str, last: bool) -> str:
    thoughts = "<think>\n\n</think>\n\n" + content.lstrip("\n")
    return (thoughts if last else content) + "<|im_end|>"


def qwen3_5(content: str, last: bool) -> str:  # "<think>\n" is in its generation prompt
    return ("\n</think>\n\n" if last else "") + content.strip() + "<|im_end|>"


def glm4(content: str, last: bool) -> str:  # a turn ends where the next begins
    words = "\n" + content.strip() if content.strip() else ""
    return "\n<think></think>" + words + ("" if last else "<|user|>")


def gptoss(content: str, last: bool) -> str:
    return "<|channel|>final<|message|>" + content + ("<|return|>" if last else "<|end|>")


def muse(content: str, last: bool) -> str:
    return " to=user<|message|>" + content + "<|eot|>"


FORMATS = {
    "qwen2_5": Format(ends("<|im_end|>")),
    "qwen3": Format(qwen3),
    "qwen3_5_think": Format(qwen3_5),
    "llama3": Format(ends("<|eot_id|>", str.strip)),
    "gemma": Format(ends("<end_of_turn>", str.strip), system=False),
    "gemma3": Format(ends("<end_of_turn>", str.strip)),
    "gemma4": Format(ends("<turn|>", str.strip)),
    "phi3": Format(ends("<|end|>")),
    "cohere": Format(ends("<|END_OF_TURN_TOKEN|>", str.strip)),
    "cohere2": Format(ends("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")),
    "deepseekv3": Format(ends("<｜end▁of▁sentence｜>")),
    "glm4moe": Format(glm4),
    "gptoss": Format(gptoss),
    "lfm2_v2": Format(ends("<|im_end|>")),
    "lfm2_2_5": Format(ends("<|im_end|>\n")),  # it marks what it wants trained
    "nemotron_3_nano": Format(ends("<|im_end|>", str.rstrip)),
    "muse_glimmer": Format(muse),
    "chatml": Format(ends("<|im_end|>")),
    "llama 2": Format(llama2),
    "alpaca": Format(ends("</s>")),
}

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]+?[|｜]>|<(?:start_of_turn|end_of_turn|turn\||\|turn|sop)>|<turn\|>|<\|turn>"
)


@cache
def _words() -> str:
    """A byte-level BPE that knows some words; no token of it holds two line breaks."""
    return byte_level_bpe(["the assistant answers the user system naïve 東京"] * 3, 340).to_str()


def source_of(name: str) -> str:
    return WRITTEN.get(name) or (SHIPPED / f"{name}.jinja").read_text()


@cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens that the template writes, as its model's has them."""
    return with_template(source_of(name))


@cache
def _line_breaks() -> str:
    """A byte for each token, but for two line breaks, which are one."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level_bpe(["\n\n"] * 3, 257, split=whole).to_str()


def with_template(
    source: str, *, merges_lines: bool = False, swallows: str = "", more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer; its special token `swallows` takes in the white space behind it."""
    backend = Tokenizer.from_str(_line_breaks() if merges_lines else _words())
    special = ["<s>", "</s>", *sorted(set(_SPECIAL.findall(source)) - {"<|user|>", "<|system|>"})]
    if "[gMASK]" in source:  # GLM's roles are tokens
        special += ["<|user|>", "<|system|>"]
    special += [token for token in (swallows, *more) if token and token not in special]
    options = {"special": True, "normalized": False}
    backend.add_special_tokens([AddedToken(t, rstrip=t == swallows, **options) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=source
    )


def prepared(chat: ChatTemplate, rows, train_on="assistant", **settings) -> list[dict[str, Any]]:
    row_format = RowFormat(chat, chat.tokenizer.eos_token, train_on=train_on, **settings)
    rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    return list(documents_from_rows(Dataset.from_list(rows), row_format).with_format("numpy"))


# Words of the templates themselves, space that some of them strip, and the stop tokens of others.
_fragments = st.sampled_from(
    [
        *("assistant", "user", "system", "<", "s", "|", "a", " ", "\n", "\n\n", "Hello", "model"),
        *("🦙", "東京", "naïve", "\uf8ff", "[INST]", "### Response:", "<|im_end|>", "</s>", "{{"),
    ]
)
contents = st.lists(st.one_of(_fragments, st.text(max_size=4)), max_size=5).map("".join)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@st.composite
def conversations(draw, system: bool) -> list[dict[str, str]]:
    same = draw(st.none() | contents)
    said = st.just(same) if same is not None else contents
    messages = [turn("system", draw(said))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += [turn("user", draw(said)), turn("assistant", draw(said))]
    return messages


SENTENCES = [turn("user", "Hi"), turn("assistant", "Hello")]
THREE = [m for n in "123" for m in (turn("user", f"ask {n}"), turn("assistant", f"say {n}"))]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOLS = [
    turn("user", "How warm?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "minus nine"},
    turn("assistant", "It is cold."),
    *SENTENCES,
]
MARKED = [
    path.stem
    for path in sorted(SHIPPED.glob("*.jinja"))
    if "{% generation" in path.read_text().replace("{%-", "{%")
    and path.stem not in ("idefics3_training", "llava_next_training", "smolvlm_training")
]


RENDERS_CALLS = [
    *("qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "lfm2_v2", "lfm2_2_5"),
    *("nemotron_3_nano", "gemma4", "gemma4_v5", "muse_glimmer", "qwen2_5_training"),
]


def reasoned(content: str, reasoning: str, key: str) -> dict[str, str]:
    return {**turn("assistant", content), key: reasoning}
