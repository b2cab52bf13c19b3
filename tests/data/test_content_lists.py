"""Contents that are lists of parts: templates read them, or the row is refused.

Templates of text models write a list as Python or JSON does, or leave it out, and raise nothing.
"""

import pytest
from helpers.chat_templates import SENTENCES, prepared, tokenizer_for, turn, with_template

from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.row_format import RowFormat


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def as_lists(messages):
    return [{**message, "content": parts(message["content"])} for message in messages]


def documents(name_or_source, messages, train_on, **settings):
    known = "{" not in name_or_source
    tokenizer = tokenizer_for(name_or_source) if known else with_template(name_or_source)
    row_format = RowFormat(
        ChatTemplate(tokenizer), tokenizer.eos_token, train_on=train_on, **settings
    )
    return row_format.documents({"messages": messages}, "messages")


GARBLES = {  # how a template treats a content that is a list
    "llama3": r"writes it as \"\[{'type': 'text', 'text': 'H",
    "gemma": r"writes it as \"\[{'type': 'text', 'text': 'H",
    "lfm2": r"writes it as '\[{\"type\": \"text\", \"text\": \"H",
    "qwen3_training": "leaves out 'H",
}


@pytest.mark.parametrize("name", GARBLES)
@pytest.mark.parametrize("train_on", [None, "last_assistant", "every_turn"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_list_that_a_template_cannot_read_is_refused(name, train_on, number):
    messages = list(SENTENCES)
    messages[number] = as_lists(messages)[number]
    with pytest.raises(ValueError, match=rf"^message {number} has a list .* {GARBLES[name]}"):
        documents(name, messages, train_on)
    assert len(documents(name, SENTENCES, train_on)) == 1, "texts are no reason"


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5_think"])
@pytest.mark.parametrize("train_on", [None, "last_assistant"])
def test_a_list_that_a_template_reads_trains_as_its_text(name, train_on):
    chat = ChatTemplate(tokenizer_for(name))
    of_texts = prepared(chat, [SENTENCES], train_on)
    of_lists = prepared(chat, [as_lists(SENTENCES)], train_on)
    for column in ("input_ids", "labels"):
        assert of_lists[0][column].tolist() == of_texts[0][column].tolist()


def test_a_result_of_a_tool_may_be_written_as_json():
    """Llama 3.1's template does so with every result."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    messages = [
        turn("user", "How warm?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": parts("nine")},
        turn("assistant", "It is cold."),
    ]
    [document] = documents("llama3_1", messages, "last_assistant", calls_tools=True)
    assert '{"type": "text", "text": "nine"}' in document.text
