"""Documents are what TRL prepares, token by token; other settings do what they say."""

import json
import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset, IterableDataset, load_dataset
from helpers.combinations import combined
from helpers.tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig
from trl_packing.data.responses import label_tokenized
from trl_packing.data.row_format import RowFormat
from trl_packing.data.tokenize_rows import (
    can_prepare,
    documents_from_rows,
)

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TURN = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>|<think>|</think>|</?tool_call>")

QUESTIONS = [
    "Natalia sold 48 clips in April, and half as many in May. How many in all?",
    "Is the sky blue?  ",
    "¿Qué hora es? 何時ですか 🕑",
    "Name three colors:\n- red\n-",
]
ANSWERS = [
    "48/2 = <<48/2=24>>24 in May.\n48+24 = 72.\n#### 72",
    "  It is, mostly.\n",
    "Son las dos. 二時です 🕑",
    "green\n- blue",
]


PAIRS = list(zip(QUESTIONS, ANSWERS, strict=True)) * 3


@cache
def tokenizer(template: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges across words' ends, and a chat template that TRL ships."""
    text = (TEMPLATES / f"{template}.jinja").read_text()
    special = sorted({"<s>", "</s>", "<pad>", *TURN.findall(text)})
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [part for pair in PAIRS for part in pair] + ["the of and to in is you that"],
        trainers.BpeTrainer(
            vocab_size=480,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=text,
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]

# Every form of row that TRL takes.
FORMS: dict[str, Any] = {
    "text": lambda q, a: {"text": f"{q} {a}"},
    "text that ends": lambda q, a: {"text": f"{q} {a}</s>"},
    "prompt, completion": lambda q, a: {"prompt": q, "completion": a},
    "prompt and space": lambda q, a: {"prompt": f"{q} ", "completion": a},
    "prompt and line": lambda q, a: {"prompt": f"{q}\n", "completion": a},
    "messages": lambda q, a: {"messages": [user(q), assistant(a)]},
    "more messages": lambda q, a: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user(q),
            assistant(a),
            user("Sure?"),
            assistant("Yes."),
        ]
    },
    "from, value": lambda q, a: {
        "conversations": [{"from": "user", "value": q}, {"from": "assistant", "value": a}]
    },
    "prompt messages": lambda q, a: {"prompt": [user(q)], "completion": [assistant(a)]},
    "prompt messages in turns": lambda q, a: {
        "prompt": [user("Hi"), assistant("Hello!"), user(q)],
        "completion": [assistant(a), user("Sure?"), assistant("Yes.")],
    },
    "tools": lambda q, a: {"messages": [user(q), assistant(a)], "tools": TOOLS},
    "tools as text": lambda q, a: {"messages": [user(q), assistant(a)], "tools": json.dumps(TOOLS)},
    "template arguments": lambda q, a: {
        "prompt": [user(q)],
        "completion": [assistant(a)],
        "chat_template_kwargs": {"enable_thinking": len(a) % 2 == 0},
    },
}
CONVERSATIONS = [form for form in FORMS if not form.startswith(("text", "prompt,", "prompt and"))]


def data_set(form: str) -> Dataset:
    return Dataset.from_list([FORMS[form](q, a) for q, a in PAIRS])


@cache
def model():
    return tiny_model("llama")


def by_trl(dataset: Any, tokenizer: Any, folder: Any, **settings: Any) -> list[tuple[list, list]]:
    """Return TRL's documents of the rows; nothing is cut."""
    formatting_func = settings.pop("formatting_func", None)
    args = config(SFTConfig, folder, **settings)
    trainer = SFTTrainer(
        model(),
        args,
        train_dataset=dataset,
        processing_class=tokenizer,
        formatting_func=formatting_func,
    )
    return documents(trainer.train_dataset)


def config(cls: type, folder: Any, **settings: Any) -> Any:
    return cls(
        str(folder),
        **{"max_length": None, "report_to": "none", "use_cpu": True, "bf16": False, **settings},
    )


def by_us(dataset: Any, tokenizer: Any, folder: Any = "o", **settings: Any) -> list[tuple]:
    formatting_func = settings.pop("formatting_func", None)
    keeps_columns = settings.pop("keeps_columns", False)
    settings = {"packing": False, **settings}
    args = config(PackedSFTConfig, folder, **settings)
    first = next(iter(dataset))
    template = None
    if args.assistant_only_loss and "{% generation" not in tokenizer.chat_template:
        template = trl.chat_template_utils.get_training_chat_template(tokenizer)
    completion_only = args.completion_only_loss
    row_format = RowFormat.from_args(
        args,
        tokenizer,
        chat_template=template,
        completion_only="completion" in first if completion_only is None else completion_only,
    )
    row_format = replace(row_format, formatting_func=formatting_func)
    prepared = documents_from_rows(dataset, row_format, keeps_columns=keeps_columns)
    return documents(prepared)


def row_format_for(rows: Dataset, tokenizer: Any, **settings: Any) -> RowFormat:
    """Return the setting of our config for rows without completions."""
    args = config(PackedSFTConfig, "o", packing=False, **settings)
    return RowFormat.from_args(args, tokenizer, chat_template=None, completion_only=False)


def documents(dataset: Any) -> list[tuple[list, list]]:
    return [(list(row["input_ids"]), list(row["labels"])) for row in dataset]


def trained_text(tokenizer: Any, documents: list[tuple]) -> list[str]:
    """Return the trained parts of each document, separated from each other."""
    texts = []
    for ids, labels in documents:
        parts, part = [], []
        for token, label in zip([*ids, None], [*labels, -100], strict=True):
            if label != -100:
                part.append(token)
            elif part:
                parts.append(tokenizer.decode(part))
                part = []
        texts.append("|".join(parts))
    return texts


# --- as TRL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_those_of_trl(tmp_path, form):
    chat = tokenizer("qwen3")
    ours, theirs = by_us(data_set(form), chat), by_trl(data_set(form), chat, tmp_path)
    assert ours == theirs
    assert by_us(data_set(form).to_iterable_dataset(num_shards=2), chat) == theirs
    # The comparison can fail: one label is enough.
    ours[-1][1][-1] += 1
    assert ours != theirs


@pytest.mark.parametrize(
    ("form", "template", "settings"),
    [
        *combined(
            ["messages", "prompt messages", "prompt messages in turns"],
            ["qwen2_5", "llama3", "gemma3", "phi3", "gptoss", "lfm2_2_5"],
            [{}],
        ),
        *combined(
            [form for form in CONVERSATIONS if form != "from, value"],
            ["qwen3", "qwen2_5", "lfm2_2_5"],
            [{"assistant_only_loss": True}],
        ),
        *combined(
            ["prompt and space", "prompt messages", "messages"],
            ["qwen2_5"],
            [{"completion_only_loss": True}, {"completion_only_loss": False}],
        ),
    ],
)
def test_other_templates_and_settings_give_the_documents_of_trl(tmp_path, form, template, settings):
    chat = tokenizer(template)
    ours = by_us(data_set(form), chat, **settings)
    assert ours == by_trl(data_set(form), chat, tmp_path, **settings)
    masks = settings.get("assistant_only_loss") or settings.get("completion_only_loss")
    assert not masks or form == "messages" or any(-100 in labels for _, labels in ours)


@pytest.mark.parametrize("form", ["text", "prompt and space", "messages"])
def test_a_tokenizer_that_adds_tokens_gives_the_documents_of_trl(tmp_path, form):
    chat = tokenizer("qwen2_5", bos=True)
    ours = by_us(data_set(form), chat)
    assert ours == by_trl(data_set(form), chat, tmp_path)
    assert (ours[0][0][0] == chat.bos_token_id) == (form != "messages")


def test_a_formatting_func_gives_the_documents_of_trl(tmp_path):
    rows = Dataset.from_list([{"q": q, "a": a} for q, a in PAIRS])
    settings = {"formatting_func": lambda row: f"Q: {row['q']}\nA: {row['a']}"}
    chat = tokenizer("qwen2_5")
    assert by_us(rows, chat, **settings) == by_trl(rows, chat, tmp_path, **settings)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3"])
def test_a_formatting_func_that_renders_the_messages_gives_the_conversations_of_trl(tmp_path, name):
    """TRL ignores the function then. No second BOS, and no EOS behind the template's end."""
    rows, chat = data_set("messages"), tokenizer(name, bos=True)

    def rendered(row):
        return chat.apply_chat_template(row["messages"], tokenize=False)

    trl = by_trl(rows, chat, tmp_path, formatting_func=rendered)
    assert by_us(rows, chat, formatting_func=rendered) == trl == by_us(rows, chat)
    # Control: any other text is the function's own, and ends in EOS.
    other = by_us(rows, chat, formatting_func=lambda row: rendered(row) + "!")
    assert [ids[-1] for ids, _ in other] == [chat.eos_token_id] * len(rows)
    texts = Dataset.from_list([{"messages": ["a", "b"]}, {"messages": ["c"]}])
    joined = by_us(texts, chat, formatting_func=lambda row: "".join(row["messages"]))
    assert [chat.decode(ids[-2:]) for ids, _ in joined] == [f"{x}{chat.eos_token}" for x in "bc"]


@pytest.mark.parametrize("completion_only", [True, False])
def test_masks_of_tokenized_rows_make_the_labels_of_trl(tmp_path, completion_only):
    marks = {"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}
    for masks in ((), ("completion_mask",), ("assistant_masks",), (*marks,)):
        row = {"input_ids": [5, 6, 7, 8], **{name: marks[name] for name in masks}}
        rows = Dataset.from_list([row] * 3)
        ours = documents(label_tokenized(rows, completion_only=completion_only))
        settings = {"completion_only_loss": completion_only}
        assert ours == by_trl(rows, tokenizer("qwen2_5"), tmp_path, **settings)


def test_a_prompt_that_tokens_reach_out_of_is_said(caplog):
    chat = tokenizer("qwen2_5")
    with caplog.at_level(logging.WARNING):
        by_us(data_set("prompt and line"), chat)
        assert "not a prefix" not in caplog.text
        by_us(data_set("prompt and space"), chat)
    assert "not a prefix" in caplog.text


# --- which tokens are trained ---------------------------------------------------------------------


def test_train_on_says_which_turns_are_trained():
    chat, rows = tokenizer("qwen2_5"), data_set("more messages").select(range(1))
    answer = ANSWERS[0]
    expected = {
        "assistant": f"{answer}<|im_end|>|Yes.<|im_end|>",
        "last_assistant": "Yes.<|im_end|>",
        "all": chat.apply_chat_template(rows[0]["messages"], tokenize=False),
    }
    for train_on, text in expected.items():
        assert trained_text(chat, by_us(rows, chat, train_on=train_on)) == [text]


def test_train_on_a_completion_leaves_the_assistant_of_the_prompt_out():
    chat, rows = tokenizer("qwen2_5"), data_set("prompt messages in turns").select(range(1))
    assert trained_text(chat, by_us(rows, chat, train_on="assistant")) == [
        f"{ANSWERS[0]}<|im_end|>|Yes.<|im_end|>"
    ]
    assert trained_text(chat, by_us(rows, chat, train_on="last_assistant")) == ["Yes.<|im_end|>"]
    assert "Hello!" in trained_text(chat, by_us(rows, chat, train_on="all"))[0]


@pytest.mark.parametrize("turns", [1, 3])
def test_a_response_template_is_found_in_text_however_it_is_tokenized(turns):
    chat = tokenizer("qwen2_5")
    exchange = "### Question: Why?\n### Answer: Because of you.\n"
    rows = Dataset.from_list([{"text": exchange * turns}])
    one = by_us(rows, chat, response_template="### Answer:")
    assert trained_text(chat, one) == [" Because of you.\n</s>"]
    many = by_us(rows, chat, response_template="### Answer:", instruction_template="### Question:")
    answers = [" Because of you.\n"] * turns
    assert trained_text(chat, many) == ["|".join(answers) + "</s>"]


def test_raw_fields_get_a_prompt():
    chat = tokenizer("qwen2_5")
    rows = Dataset.from_list([{"query": "2 + 3?", "response": "5"}])
    ((ids, labels),) = by_us(rows, chat, prompt_template="alpaca")
    text = chat.decode(ids)
    assert text.startswith("Below is an instruction")
    assert text.endswith("### Response:\n5</s>")
    assert trained_text(chat, [(ids, labels)]) == ["5</s>"]
    for names in (("instruction", "output"), ("question", "answer"), ("query", "completion")):
        other = Dataset.from_list([dict(zip(names, ("2 + 3?", "5"), strict=True))])
        assert by_us(other, chat, prompt_template="alpaca") == [(ids, labels)]


def test_of_several_columns_with_answers_the_one_that_is_meant_must_be_named():
    chat, row = tokenizer("qwen2_5"), {"question": "2 + 3?", "output": "5", "answer": "6"}
    with pytest.raises(ValueError, match=r"\['output', 'answer'\]; rename the one that is meant"):
        by_us(Dataset.from_list([row]), chat, prompt_template="qa")
    ((ids, _),) = by_us(Dataset.from_list([row | {"response": "7"}]), chat, prompt_template="qa")
    assert chat.decode(ids).endswith("7</s>")


# --- bad input ------------------------------------------------------------------------------------

GOOD = {"messages": [user("Hi"), assistant("Ho")]}


PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        ([{"text": "a"}, PAIR], {}, "row 1 .*completions, but the first row text"),
        ([{"text": "a"}], {"train_on": "assistant"}, "train_on='assistant' is about messages"),
        ([PAIR], {"response_template": "x"}, "leave it out: the completion"),
        ([{"query": "a"}], {"prompt_template": "alpaca"}, "row 0 .*'response'"),
        ([{"conversations": [{"from": "alien", "value": "Hi"}]}], {}, "row 0 .*from 'alien'"),
        ([{**GOOD, "tools": "[not json"}], {}, "row 0 .*'tools' must be a list"),
        ([{"messages": [assistant("I begin.")]}], {}, "row 0 .*cannot render .*roles must"),
    ],
)
def test_bad_rows_are_named_in_one_sentence(rows, settings, sentence):
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match=sentence) as error:
        by_us(stream, tokenizer("gemma" if "roles" in sentence else "qwen2_5"), **settings)
    assert "\n" not in str(error.value)


def test_conversations_need_a_chat_template():
    bare = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("qwen2_5").backend_tokenizer, eos_token="</s>"
    )
    with pytest.raises(ValueError, match="no chat template; set chat_template_path"):
        by_us(data_set("messages"), bare)
    bare.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token, so its documents would"):
        by_us(data_set("text"), bare)


# --- cache and columns ----------------------------------------------------------------------------


def test_a_second_run_reads_the_cache(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    dataset = load_dataset(
        "json", data_files=str(tmp_path / "data.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    chat = tokenizer("qwen2_5")
    supervisions = [
        row_format_for(dataset, chat, **settings)
        for settings in ({}, {}, {"response_template": "a"})
    ]
    first, second, other = (documents_from_rows(dataset, s).cache_files for s in supervisions)
    assert first == second != other


def test_other_columns_stay_where_they_are_kept():
    rows = data_set("text").add_column("source", list(range(len(data_set("text")))))
    chat = tokenizer("qwen2_5")
    row_format = row_format_for(rows, chat)
    kept = documents_from_rows(rows, row_format, keeps_columns=True)
    assert kept.column_names == ["text", "source", "input_ids", "labels"]
    assert documents_from_rows(rows, row_format).column_names == ["input_ids", "labels"]


def test_processors_and_tokenizers_of_their_own_take_the_code_of_trl():
    class OwnTemplate(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return []

    assert can_prepare(tokenizer("qwen2_5"))
    assert not can_prepare(SimpleNamespace())
    assert not can_prepare(ByT5Tokenizer()), "slow tokenizers have no offsets"
    assert not can_prepare(OwnTemplate(tokenizer_object=tokenizer("qwen2_5").backend_tokenizer))
