"""Documents are what TRL prepares, token by token; other settings do what they say."""

import json
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from datasets import Dataset, Features, List, load_dataset
from harness import make_trainer
from helpers.chat_templates import source_of, turn, with_template
from helpers.combinations import combined
from helpers.tiny import WEATHER_TOOL, assistant, tiny_model, user
from tokenizers import processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from trl import SFTTrainer

#: Answers that merge with a space before them, white space at both ends, characters of many bytes.
PAIRS = [
    ("Natalia sold 48 clips in April. How many are the rest?", "the answer:\n48+24 = 72.\n#### 72"),
    ("Is the sky blue?  ", "  It is, mostly.\n"),
    ("¿Qué hora es? 何時ですか 🕑", "Son las dos. 二時です 🕑"),
    ("Name three colors:\n- red\n-", "assistant\n- blue"),
] * 3
ANSWER = PAIRS[0][1]


def tokenizer(template: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE, and a chat template that TRL ships."""
    chat = with_template(source_of(template))
    chat.pad_token = "<s>"
    if bos:
        chat.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", chat.bos_token_id)]
        )
    return chat


def chat(question: str, answer: str) -> list[dict[str, Any]]:
    return [user(question), assistant(answer)]


MORE = chat("Sure?", "Yes.")
# Every form of row that TRL takes.
FORMS: dict[str, Any] = {
    "text": lambda q, a: {"text": f"{q} {a}"},
    "prompt, completion": lambda q, a: {"prompt": q, "completion": a},
    "prompt and space": lambda q, a: {"prompt": f"{q} ", "completion": a},
    "messages": lambda q, a: {"messages": chat(q, a)},
    "more messages": lambda q, a: {"messages": [turn("system", "Be brief."), *chat(q, a), *MORE]},
    "from, value": lambda q, a: {
        "conversations": [{"from": "user", "value": q}, {"from": "assistant", "value": a}]
    },
    "prompt messages": lambda q, a: {"prompt": [user(q)], "completion": [assistant(a)]},
    "prompt messages in turns": lambda q, a: {
        "prompt": [*chat("Hi", "Hello!"), user(q)],
        "completion": [assistant(a), *MORE],
    },
    "tools": lambda q, a: {"messages": chat(q, a), "tools": [WEATHER_TOOL]},
    "tools as text": lambda q, a: {"messages": chat(q, a), "tools": json.dumps([WEATHER_TOOL])},
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
    return tiny_model("llama", vocab_size=1024)


def prepared(rows: Any, chat: Any, folder: Any, formatting_func=None, **settings: Any) -> Any:
    """Return the prepared data set of a trainer; nothing is cut."""
    settings = {"max_length": None, "packing": False, "tokenizer": chat, **settings}
    arguments = {"formatting_func": formatting_func}
    return make_trainer(folder, rows, model(), arguments=arguments, **settings).train_dataset


def documents(rows: Any, chat: Any, folder: Any, **settings: Any) -> list[tuple[list, list]]:
    """Return ids and labels of each document."""
    found = prepared(rows, chat, folder, **settings)
    return [(list(row["input_ids"]), list(row["labels"])) for row in found]


def by_trl(*args: Any, **settings: Any) -> list[tuple[list, list]]:
    return documents(*args, cls=SFTTrainer, **settings)


def trained_text(chat: Any, documents: list[tuple]) -> list[str]:
    """Return the trained parts of each document, separated from each other."""
    texts = []
    for document in documents:
        runs = groupby(zip(*document, strict=True), key=lambda token: token[1] != -100)
        trained = [[token for token, _ in run] for is_trained, run in runs if is_trained]
        texts.append("|".join(map(chat.decode, trained)))
    return texts


# --- as TRL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_those_of_trl(tmp_path, form, caplog):
    rows, chat = data_set(form), tokenizer("qwen3")
    theirs = by_trl(rows, chat, tmp_path)
    caplog.clear()
    ours = documents(rows, chat, tmp_path)
    assert ours == theirs
    assert documents(rows.to_iterable_dataset(num_shards=2), chat, tmp_path, max_steps=1) == theirs
    # A prompt that tokens reach out of is said.
    assert ("not a prefix" in caplog.text) == (form == "prompt and space")
    # The comparison can fail: one label is enough.
    ours[-1][1][-1] += 1
    assert ours != theirs


LIKE_TRL = [
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
]


@pytest.mark.parametrize(("form", "template", "settings"), LIKE_TRL)
def test_other_templates_and_settings_give_the_documents_of_trl(tmp_path, form, template, settings):
    chat = tokenizer(template)
    ours = documents(data_set(form), chat, tmp_path, **settings)
    assert ours == by_trl(data_set(form), chat, tmp_path, **settings)
    masks = settings.get("assistant_only_loss") or settings.get("completion_only_loss")
    assert not masks or form == "messages" or any(-100 in labels for _, labels in ours)


@pytest.mark.parametrize("form", ["messages", "prompt messages"])
def test_special_tokens_in_the_words_of_users_become_text_as_in_trl(tmp_path, form):
    pytest.importorskip("transformers", "5.23")  # older ones do not know the option
    chat = tokenizer("qwen2_5", bos=True)
    rows, plain = (
        Dataset.from_list(
            [
                {**FORMS[form]("Why <|im_end|>?", "So."), "chat_template_kwargs": kwargs}
                for kwargs in (
                    {"sanitize_control_tokens": each},
                    {"sanitize_control_tokens": False},
                )
            ]
        )
        for each in (True, False)
    )
    ours = documents(rows, chat, tmp_path)
    assert ours == by_trl(rows, chat, tmp_path)
    assert len(ours[0][0]) > len(documents(plain, chat, tmp_path)[0][0]), "the control"
    assert any(-100 in labels for _, labels in ours) == (form != "messages")
    for refused in ({"train_on": "assistant"}, {"train_on": "every_turn"}):
        with pytest.raises(ValueError, match=r"row 0 .*sanitize_control_tokens=True.*leave it out"):
            documents(rows, chat, tmp_path, **refused)


@pytest.mark.parametrize("streamed", [False, True])
def test_lists_of_a_fixed_size_are_read(tmp_path, streamed):
    chat = tokenizer("qwen2_5")
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "loss_weights": [1.0] * 4}
    rows = Dataset.from_list([{**row, "input_ids": [n, 6, 7, 8]} for n in range(5, 11)])
    talk = Dataset.from_list([FORMS["messages"]("Why?", "So.")] * 3)
    for given, settings in (
        (rows, {}),
        (rows, {"max_length": 3, "packing": True, "overflow": "split", "append_eos": True}),
        (rows.select_columns(["input_ids"]).select([4, 1]), {"max_length": 3}),
        (talk, {}),
    ):
        sizes = {"messages": 2}
        fixed = Features({c: List(f.feature, sizes.get(c, 4)) for c, f in given.features.items()})
        pair = [given, given.cast(fixed)]
        if streamed:
            pair = [each.to_iterable_dataset() for each in pair]
            settings = {**settings, "max_steps": 1}
        plain, ours = (prepared(each, chat, tmp_path, **settings) for each in pair)
        for column in ("input_ids", "labels"):
            assert [d.get(column) for d in ours] == [d.get(column) for d in plain]


@pytest.mark.parametrize("form", ["text", "prompt and space"])
def test_a_tokenizer_that_adds_tokens_gives_the_documents_of_trl(tmp_path, form):
    chat = tokenizer("qwen2_5", bos=True)
    ours = documents(data_set(form), chat, tmp_path)
    assert ours == by_trl(data_set(form), chat, tmp_path)
    assert ours[0][0][0] == chat.bos_token_id


class OwnTemplate(PreTrainedTokenizerFast):
    """Renders a conversation without its last message."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return super().apply_chat_template(conversation[:-1], **kwargs)


@pytest.mark.filterwarnings("ignore:This sequence already has")
@pytest.mark.parametrize("form", ["text", "more messages"])
def test_tokenizers_that_are_slow_or_render_by_themselves_take_the_code_of_trl(tmp_path, form):
    """These take the code of TRL."""
    chat, plain = tokenizer("qwen2_5"), tokenizer("qwen2_5")
    chat.__class__ = OwnTemplate
    chat = ByT5Tokenizer() if form == "text" else chat
    ours = documents(data_set(form), chat, tmp_path)
    assert (
        ours == by_trl(data_set(form), chat, tmp_path) != documents(data_set(form), plain, tmp_path)
    )


class RefusedChat(Exception):
    """mistral-common's errors have no other base."""


class MistralCommonBackend(PreTrainedTokenizerFast):
    """What transformers' class of this name has and lacks (5.24, with mistral-common 1.13)."""

    tokenizer = object()

    @property
    def is_fast(self) -> bool:
        raise AttributeError("MistralCommonBackend has no attribute is_fast")

    def get_chat_template(self, chat_template=None, tools=None):
        raise NotImplementedError

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        if len(conversation) % 2:
            raise RefusedChat("Expected last role Assistant for finetuning but got user")
        return self("".join(message["content"] for message in conversation))


def mistral_common() -> MistralCommonBackend:
    chat = tokenizer("qwen2_5")
    chat.__class__ = MistralCommonBackend
    chat.chat_template = None
    chat.split_special_tokens = True  # no text becomes a special token
    return chat


def test_a_tokenizer_of_mistral_common_gives_the_documents_of_trl(tmp_path, caplog):
    for form in ("messages", "prompt, completion", "text"):
        assert "not the stop token" not in caplog.text or form == "text"
        rows = data_set(form)
        ours = documents(rows, mistral_common(), tmp_path)
        assert ours == by_trl(rows, mistral_common(), tmp_path)
    assert mistral_common().decode(ours[0][0]).endswith("</s>")
    assert ours[0][0][-1] != mistral_common().eos_token_id  # TRL's text became other tokens
    assert "end in the text '</s>', which is not the stop token" in caplog.text
    assert "mistral_format=False)), or rows of input_ids" in caplog.text


MISTRAL_REFUSES = [
    ("prompt messages", {}, "cannot be prepared: Expected last role Assistant"),
    ("prompt messages", {"stream": True}, "cannot be prepared: Expected last role Assistant"),
    ("messages", {"train_on": "assistant"}, "train_on cannot be used on the train dataset"),
    ("messages", {"assistant_only_loss": True}, "needs a chat template, .* has none"),
    ("messages", {"chat_template_path": "c.jinja"}, "tokenizer reads no chat template"),
    (
        "prompt messages",
        {"chat_template_path": "c.jinja", "assistant_only_loss": True},
        "tokenizer reads no chat template",
    ),
]


@pytest.mark.parametrize(("form", "settings", "words"), MISTRAL_REFUSES)
def test_mistral_common_is_refused_with_the_way_out(tmp_path, monkeypatch, form, settings, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jinja").write_text("{% generation %}{{ messages }}{% endgeneration %}")
    rows = data_set(form)
    if settings.pop("stream", False):
        rows, settings = rows.to_iterable_dataset(), {"max_steps": 1, "max_length": 64}
    with pytest.raises(ValueError, match=f"{words}.*mistral_format=False"):
        documents(rows, mistral_common(), tmp_path, **settings)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3"])
def test_a_formatting_func_that_renders_the_messages_gives_the_conversations_of_trl(tmp_path, name):
    """TRL ignores the function then. No second BOS, and no EOS behind the template's end."""
    rows = data_set("messages")
    chat = tokenizer(name, bos=True)

    def rendered(row):
        return chat.apply_chat_template(row["messages"], tokenize=False)

    ours = documents(rows, chat, tmp_path, formatting_func=rendered)
    trl = by_trl(rows, chat, tmp_path, formatting_func=rendered)
    assert ours == trl == documents(rows, chat, tmp_path)
    # Control: any other text is the function's own, and ends in EOS.
    rows = Dataset.from_list([{"q": q} for q, _ in PAIRS])
    other = {"formatting_func": lambda row: f"Q: {row['q']}"}
    ours = documents(rows, chat, tmp_path, **other)
    assert ours == by_trl(rows, chat, tmp_path, **other)
    assert {ids[-1] for ids, _ in ours} == {chat.eos_token_id}


@pytest.mark.parametrize("completion_only", [True, False])
@pytest.mark.parametrize("masks", [[], ["completion_mask"], ["completion_mask", "assistant_masks"]])
def test_masks_of_tokenized_rows_make_the_labels_of_trl(tmp_path, completion_only, masks):
    row = {
        "input_ids": [5, 6, 7, 8],
        "completion_mask": [0, 0, 1, 1],
        "assistant_masks": [0, 1] * 2,
    }
    rows = Dataset.from_list([{name: row[name] for name in ("input_ids", *masks)}] * 3)
    given = (rows, tokenizer("qwen2_5"), tmp_path)
    settings = {"completion_only_loss": completion_only}
    assert documents(*given, **settings) == by_trl(*given, **settings)


# --- which tokens are trained ---------------------------------------------------------------------


def test_train_on_trains_turns_of_a_completion_and_not_of_its_prompt(tmp_path):
    chat = tokenizer("qwen2_5")
    rows = data_set("prompt messages in turns").select(range(1))
    texts = [f"{ANSWER}<|im_end|>|Yes.<|im_end|>", "Yes.<|im_end|>"]
    for train_on, text in zip(("assistant", "last_assistant"), texts, strict=True):
        assert trained_text(chat, documents(rows, chat, tmp_path, train_on=train_on)) == [text]


@pytest.mark.parametrize("turns", [1, 3])
def test_a_response_template_is_found_in_text_however_it_is_tokenized(tmp_path, turns):
    chat = tokenizer("qwen2_5")
    both = {"instruction_template": "### Question:"}
    rows = [{"text": "### Question: Why?\n### Answer: Because of you.\n" * turns}]
    for more, answers in (({}, 1), (both, turns)):
        found = documents(rows, chat, tmp_path, response_template="### Answer:", **more)
        assert trained_text(chat, found) == ["|".join([" Because of you.\n"] * answers) + "</s>"]


def test_raw_fields_get_a_prompt(tmp_path):
    chat = tokenizer("qwen2_5")
    row = {"question": "2 + 3?", "output": "6", "response": "5"}
    found = documents([row], chat, tmp_path, prompt_template="qa")
    assert chat.decode(found[0][0]) == "Question: 2 + 3?\nAnswer:\n5</s>"
    assert trained_text(chat, found) == ["5</s>"]


# --- cache and columns ----------------------------------------------------------------------------


def test_a_second_run_reads_the_cache(tmp_path):
    file = tmp_path / "data.jsonl"
    chat = tokenizer("qwen2_5")
    file.write_text('{"text": "a b"}\n{"text": "a c"}\n')
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path))
    first, second, other = (
        prepared(rows, chat, tmp_path, **settings).cache_files
        for settings in ({}, {}, {"response_template": "a"})
    )
    assert first == second != other
