"""With `train_on="every_turn"`, each turn of the assistant is a document as at inference.

A document is the prompt that `apply_chat_template(messages[:turn], add_generation_prompt=True)`
gives, token by token, and the turn up to its stop token, which alone is trained.
"""

import re
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from helpers.chat_templates import (
    CALL,
    FORMATS,
    MARKED,
    RENDERS_CALLS,
    SENTENCES,
    THREE,
    TOOLS,
    conversations,
    prepared,
    reasoned,
    tokenizer_for,
    turn,
    with_template,
)
from helpers.merging import merging_tokenizer
from helpers.tiny import WEATHER_TOOL
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.counts import FIRST, TURN
from trl_packing.data.row_format import RowFormat
from trl_packing.data.tokenize_rows import documents_from_rows
from trl_packing.documents.labels import HANDLED


def turns_of(tokenizer: Any, row: Any, **settings: Any) -> list[str]:
    """Return what is trained of each document, once its prompt has been compared by tokens."""
    row = row if isinstance(row, dict) else {"messages": row}
    documents = prepared(ChatTemplate(tokenizer), [row], "every_turn", **settings)
    messages = [{k: v for k, v in m.items() if k not in ("train", "weight")} for m in all_of(row)]
    numbers = [
        n
        for n, m in enumerate(messages)
        if m["role"] == "assistant"
        and n >= len(row.get("prompt", []))
        and all_of(row)[n].get("train") is not False
    ]
    texts = []
    for number, document in zip(numbers, documents, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages[:number],
            tools=row.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **row.get("chat_template_kwargs", {}),
        )
        ids, labels = document["input_ids"].tolist(), document["labels"].tolist()
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
        texts.append(tokenizer.decode(ids[len(prompt) :]))
    return texts


def all_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    return row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]


def written(name: str, content: str) -> str:
    """Return the turn of a template, from its generation prompt to its stop token."""
    text = FORMATS[name].written(content, True)
    return text.removesuffix("\n") + ("<|user|>" if name == "glm4moe" else "")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_document_is_the_prompt_of_inference_and_the_turn_token_by_token(name, data):
    messages = data.draw(conversations(FORMATS[name].system))
    contents = [m["content"] for m in messages if m["role"] == "assistant"]
    if name == "deepseekv3":  # it thinks before every answer, and these answers have no thoughts
        return
    expected = [written(name, content) for content in contents]
    if name == "nemotron_3_nano":  # its prompt ends "<think>\n", its turn begins "<think></think>"
        expected = ["</think>" + content.rstrip() + "<|im_end|>" for content in contents]
    assert turns_of(tokenizer_for(name), messages) == expected


# --- reasoning ------------------------------------------------------------------------------------

TWICE = [
    turn("user", "2 + 2"),
    reasoned("It is 4.", "two twos", "reasoning_content"),
    turn("user", "And 3 + 3"),
    reasoned("It is 6.", "two threes", "reasoning_content"),
]
THINKS = {
    "qwen3": "<think>\n{0}\n</think>\n\n{1}<|im_end|>",
    "qwen3_5_think": "{0}\n</think>\n\n{1}<|im_end|>",
    "qwen3_8": "{0}\n</think>\n\n{1}<|im_end|>",
    "glm4moe": "\n<think>{0}</think>\n{1}<|user|>",
    "nemotron_3_nano": "{0}\n</think>\n{1}<|im_end|>",
    "gptoss": "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final"
    "<|message|>{1}<|return|>",
    "gemma4_v5": "<|channel>thought\n{0}\n<channel|>{1}<turn|>",
    "lfm2_2_5": "<think>{0}</think>{1}<|im_end|>",
}


@pytest.mark.parametrize("name", THINKS)
def test_the_reasoning_of_every_turn_is_trained(name):
    expected = [
        THINKS[name].format("two twos", "It is 4."),
        THINKS[name].format("two threes", "It is 6."),
    ]
    assert turns_of(tokenizer_for(name), TWICE) == expected


# Thoughts of earlier turns are dropped; the prompt opens new ones, and no turn is rendered with its
# own (DeepSeek R1, QwQ).
DROPS_ALL = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\
{{ m.content.split('</think>')[-1] }}<|end|>{% else %}{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"""
# The same, and the prompt opens nothing (the first template of R1).
DROPS_UNOPENED = DROPS_ALL.replace("<think>\n{%", "{%")
# The prompt opens thoughts, and contents stay as they are.
KEEPS_ALL = DROPS_ALL.replace(".split('</think>')[-1]", "")
# An empty thought stands before every content (Qwen 3.8).
THINKS_TWICE = KEEPS_ALL.replace(
    "{{ m.content }}<|end|>", "<think>\n\n</think>\n\n{{ m.content }}<|end|>"
)


def thinking(*contents: str) -> list[dict[str, str]]:
    return [m for c in contents for m in (turn("user", "Why?"), turn("assistant", c))]


@pytest.mark.parametrize("source", [DROPS_ALL, DROPS_UNOPENED, KEEPS_ALL, THINKS_TWICE])
def test_thoughts_in_a_content_are_what_the_model_writes_next(source):
    tokenizer = with_template(source)
    messages = thinking("<think>\nHm.\n</think>\n\nSo.", "<think>\nOh\n</think>\n\nNo. ")
    opening = "<think>\n" if source == DROPS_UNOPENED else ""
    expected = [opening + "Hm.\n</think>\n\nSo.<|end|>", opening + "Oh\n</think>\n\nNo. <|end|>"]
    assert turns_of(tokenizer, messages) == expected


def refusal(tokenizer: Any, *messages: dict[str, Any], **columns: Any) -> str:
    rows = [{"messages": [*messages], **columns}]
    with pytest.raises(ValueError, match=r"^row 0 of the train dataset: ") as error:
        prepared(ChatTemplate(tokenizer), rows, "every_turn")
    return str(error.value)


@pytest.mark.parametrize("source", [DROPS_ALL, KEEPS_ALL])
def test_a_prompt_that_opens_thoughts_needs_them(source):
    tokenizer = with_template(source)
    begun = thinking("Hm.\n</think>\n\nSo.")
    assert turns_of(tokenizer, begun) == ["Hm.\n</think>\n\nSo.<|end|>"]
    found = refusal(tokenizer, *SENTENCES)
    assert re.search(r"reads .*<think>\\n' at the end .* message 1, .* writes 'Hello", found)
    assert "the reasoning" in refusal(tokenizer, *thinking("Hm.\n<think>Oh</think>"))


def test_reasoning_that_a_prompt_has_closed_or_a_template_drops_is_refused():
    tokenizer = tokenizer_for("qwen3")
    off = {"enable_thinking": False}
    assert "(enable_thinking)" in refusal(tokenizer, *TWICE, chat_template_kwargs=off)
    row = {"messages": SENTENCES, "chat_template_kwargs": off}
    assert turns_of(tokenizer, row) == ["Hello<|im_end|>"]
    found = refusal(tokenizer_for("llama3"), *TWICE)
    assert "leaves out the reasoning of message 1 ('two twos') even where it is the last" in found


# --- other prompts --------------------------------------------------------------------------------


def test_a_template_without_a_stop_ends_turns_as_the_next_one_begins():
    tokenizer = tokenizer_for("glm4moe")
    call = {"role": "assistant", "content": "", "tool_calls": TOOLS[1]["tool_calls"]}
    [first, *_] = turns_of(tokenizer, [TOOLS[0], call, *TOOLS[2:]])
    assert first.endswith("</tool_call><|observation|>")
    plain = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert turns_of(plain, SENTENCES) == ["assistant: Hello\n"]


@pytest.mark.parametrize("name", RENDERS_CALLS)
def test_calls_are_turns_and_what_tools_answer_is_in_the_prompt(name):
    row = {"messages": TOOLS, "tools": [WEATHER_TOOL]}
    texts = turns_of(tokenizer_for(name), row, calls_tools=True)
    for words, text in zip((("weather", "Bern"), ("It is cold.",), ("Hello",)), texts, strict=True):
        assert all(word in text for word in words)
        assert "nine" not in text


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_a_template_say_what_is_trained_of_a_turn(name):
    if "deepseek" in name:
        return
    chat = ChatTemplate(tokenizer_for(name))
    documents = prepared(chat, [THREE], "every_turn")
    for number, document in enumerate(documents, 1):
        ids, labels = document["input_ids"], document["labels"]
        assert f"say {number}" in chat.tokenizer.decode(ids[labels != -100])
        assert "ask" not in chat.tokenizer.decode(ids[labels != -100])


# --- which turns, and their weights ---------------------------------------------------------------


def test_a_message_says_whether_it_is_trained_and_how_much():
    tokenizer = tokenizer_for("chatml")
    flagged = [dict(message) for message in THREE]
    flagged[1]["train"] = False
    flagged[3]["weight"] = 0.5
    assert turns_of(tokenizer, flagged) == ["say 2<|im_end|>", "say 3<|im_end|>"]
    half, whole = prepared(ChatTemplate(tokenizer), [flagged], "every_turn")
    for document, weight in ((half, 0.5), (whole, 1.0)):
        expected = np.where(document["labels"] != -100, weight, 0)
        assert document["loss_weights"].tolist() == expected.tolist()
    for wrong in ([{**THREE[0], "train": True}, *THREE[1:]], [THREE[1], *SENTENCES]):
        assert "message 0 is no answer" in refusal(tokenizer, *wrong)


def test_documents_have_the_columns_of_their_row_and_the_number_of_their_turn():
    chat = ChatTemplate(tokenizer_for("chatml"))
    row_format = RowFormat(chat, "</s>", train_on="every_turn")
    rows = Dataset.from_list(
        [
            {"messages": THREE, "source": "a", "loss_weight": 2.0, "other": [1]},
            {"messages": [turn("user", "Hi")], "source": "b", "loss_weight": 1.0, "other": [2]},
            {"messages": SENTENCES, "source": "c", "loss_weight": 0.5, "other": [3]},
        ]
    )
    found = documents_from_rows(
        rows, row_format, keeps_columns=True, document_columns=["source", "loss_weight"]
    )
    kept = {"source", "loss_weight"}
    assert set(found.column_names) == {"input_ids", "labels", HANDLED, *kept}
    assert found["source"][:] == list("aaabc")
    assert found["loss_weight"][:] == [2.0, 2.0, 2.0, 1.0, 0.5]
    begins = FIRST | TURN
    assert found[HANDLED][:] == [begins, TURN, TURN, FIRST, begins]
    stream = documents_from_rows(rows.to_iterable_dataset(2), row_format)
    assert [row["input_ids"] for row in stream] == found["input_ids"][:]


THINKING_AGENT = [
    turn("user", "How warm?"),
    {"role": "assistant", "content": "", "thinking": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "minus nine"},
    reasoned("It is cold.", "That is below zero.", "thinking"),
    *SENTENCES,
]
# Names of speakers are in prompts alone.
FORGETS = """\
{% for m in messages %}<|{{ m.role }}|>{{ m.name + ': ' if m.name and add_generation_prompt }}\
{{ m.content }}<|end|>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_an_answer_that_changes_the_messages_before_it_follows_its_own_prompt(name):
    tokenizer = tokenizer_for(name)
    row = {"messages": THINKING_AGENT, "tools": [WEATHER_TOOL]}
    call, cold, hello = turns_of(tokenizer, row, calls_tools=True)
    header = "<|end|><|start|>assistant"
    assert call.startswith(f"<|channel|>analysis<|message|>I look it up.{header} to=functions.weat")
    assert call.endswith("<|call|>")
    thoughts = f"<|channel|>analysis<|message|>That is below zero.{header}"
    assert cold == thoughts + "<|channel|>final<|message|>It is cold.<|return|>"
    assert hello == "<|channel|>final<|message|>Hello<|return|>"


def test_another_mode_names_every_turn_where_it_helps():
    rows = [{"messages": THINKING_AGENT, "tools": [WEATHER_TOOL]}]
    named = [turn("user", "Hi") | {"name": "Ann"}, turn("assistant", "Hello")]
    with pytest.raises(ValueError, match=r"message 1 .*set train_on='every_turn'"):
        prepared(ChatTemplate(tokenizer_for("gptoss")), rows, "assistant", calls_tools=True)
    tokenizer = with_template(FORGETS)
    assert turns_of(tokenizer, named) == ["Hello<|end|>"]
    refused = with_template(FORGETS.replace("'<|assistant|>' if add", "'<|user|>' if add"))
    assert "; use another template, or set its 'train' to false" in refusal(refused, *named)


# --- tokens that merge ----------------------------------------------------------------------------


ASKS = """\
{% for m in messages %}{{ 'A?' if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>\
{% endfor %}{{ 'A?' if add_generation_prompt else '' }}"""


@pytest.mark.parametrize("content", ["\nSo.", "So."])
def test_tokens_do_not_merge_where_the_prompt_ends(content):
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = ASKS
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    messages = [turn("user", "Hi"), turn("assistant", content)]
    assert turns_of(tokenizer, messages) == [content + "<|im_end|>"]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    alone, together = tokenizer(prompt)["input_ids"], tokenizer(prompt + content)["input_ids"]
    assert (together[: len(alone)] != alone) == content.startswith("\n"), "the case is tried"
