"""Contents that are lists of parts: templates read them, or the row is refused.

Templates of text models write a list as Python or JSON does, or leave it out, and raise nothing.
"""

import pytest
from helpers.chat_templates import SENTENCES, TOOLS, prepared, tokenizer_for

from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.row_format import RowFormat


def as_list(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def documents(name, messages, train_on):
    row_format = RowFormat(ChatTemplate(tokenizer_for(name)), "</s>", train_on=train_on)
    return row_format.documents({"messages": messages}, "messages")


@pytest.mark.parametrize("name", ["llama3", "lfm2", "qwen3_training"])  # Python, JSON, nothing
@pytest.mark.parametrize("train_on", [None, "last_assistant", "every_turn"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_list_that_a_template_cannot_read_is_refused(name, train_on, number):
    messages = list(SENTENCES)
    messages[number] = as_list(messages[number])
    with pytest.raises(ValueError, match=rf"message {number} has a list as content, .*not read"):
        documents(name, messages, train_on)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5_think"])
@pytest.mark.parametrize("train_on", [None, "last_assistant"])
def test_a_list_that_a_template_reads_trains_as_its_text(name, train_on):
    chat = ChatTemplate(tokenizer_for(name))
    [of_texts] = prepared(chat, [SENTENCES], train_on)
    [of_lists] = prepared(chat, [[*map(as_list, SENTENCES)]], train_on)
    for column in ("input_ids", "labels"):
        assert of_lists[column].tolist() == of_texts[column].tolist()


def test_a_result_of_a_tool_may_be_written_as_json():
    """Llama 3.1's template does so with every result."""
    [document] = documents("llama3_1", [*TOOLS[:2], as_list(TOOLS[2]), TOOLS[3]], "last_assistant")
    assert '{"type": "text", "text": "minus nine"}' in document.text
