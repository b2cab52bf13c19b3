"""ShareGPT becomes messages, bad messages are named, each says whether it is trained."""

import json

import pytest

from trl_packing.data.messages import (
    check_messages,
    messages_from_sharegpt,
    tools_from_value,
    trained_messages,
    without_flags,
)

CALL = {"name": "weather", "arguments": {"city": "Bern"}}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def from_sharegpt(*turns, tool_calls: bool = True, **more):
    return messages_from_sharegpt(
        [{"from": who, "value": value, **more} for who, value in turns], tool_calls=tool_calls
    )


def test_roles_of_sharegpt_become_those_of_messages():
    speakers = ("system", "human", "gpt", "observation", "chatgpt")
    roles = ("system", "user", "assistant", "tool", "assistant")
    turns = from_sharegpt(*((who, n) for n, who in enumerate(speakers)), weight=0.5)
    assert turns == [{"role": r, "content": n, "weight": 0.5} for n, r in enumerate(roles)]
    with pytest.raises(ValueError, match=r"message 1 is from 'alien', .* none of .*rename"):
        from_sharegpt(("human", "Hi"), ("alien", "x"))


@pytest.mark.parametrize("value", [CALL, [CALL, {"name": "time", "arguments": {}}]])
def test_a_function_call_becomes_tool_calls(value):
    calls = value if isinstance(value, list) else [value]
    wrapped = [{"type": "function", "function": call} for call in calls]
    expected = {"role": "assistant", "content": "", "train": False, "tool_calls": wrapped}
    assert from_sharegpt(("function_call", json.dumps(value)), train=False) == [expected]


@pytest.mark.parametrize("value", ["weather(Bern)", '{"city": "Bern"}', "[1]", "[]", CALL])
def test_a_function_call_that_is_no_json_of_calls_or_not_wanted_stays_text(value):
    text = value if isinstance(value, str) else json.dumps(value)
    found = from_sharegpt(("function_call", text), tool_calls=isinstance(value, str))
    assert found == [{"role": "assistant", "content": text}]


BARE = {"name": "weather", "parameters": {}}
WRAPPED = {"type": "function", "function": BARE}


def test_tools_are_a_list_or_nothing_and_json_is_read():
    for nothing in (None, "", "null", []):
        assert tools_from_value(nothing) is None
    for tools in ([WRAPPED], json.dumps([WRAPPED])):
        assert tools_from_value(tools) == [WRAPPED]
    for tools in ([BARE], json.dumps([BARE]), [WRAPPED]):
        assert tools_from_value(tools, sharegpt=True) == [WRAPPED]
    for wrong in ('{"name": "weather"}', "21", '["weather"]', {"a": 1}, "[x"):
        with pytest.raises(ValueError, match=r"'tools' must be a list of dictionaries, .*got"):
            tools_from_value(wrong)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": None}, r"\(user\) has no content; remove the row"),
        ({"role": "wizard", "content": "x"}, "has the role 'wizard', which is none of .* rename"),
        ({"role": "user", "content": 7}, r"\(user\) has int 7 as content; make it a string"),
        ({"role": "user", "content": ["x"]}, r"\(user\) has list .* with a 'type'"),
        ("Hi", "is str 'Hi', not a dictionary with 'role' and 'content'"),
        ({**ANSWER, "tool_calls": "[]"}, r"\(assistant\) has str '\[\]' as tool_calls"),
    ],
)
def test_a_bad_message_is_named_with_what_is_wrong(message, complaint):
    with pytest.raises(ValueError, match=r"message 1 of 'prompt' " + complaint):
        check_messages([USER, message], "", what="prompt")
    for wrong, got in (([], r"list \[\]"), (None, r"nothing \(null\)"), (USER, "dict")):
        with pytest.raises(ValueError, match=f"'messages' must be a list of at least .*got {got}"):
            check_messages(wrong, "")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "tool", "content": "21°", "name": "weather"},
        {"role": "wizard", "content": "named by the template"},
    ],
)
def test_good_messages_pass(message):
    check_messages([USER, message], "{% if message.role == 'wizard' %}")


def conversation(*flags: dict) -> list[dict]:
    """User and assistant in turn, as many as there are flags, which go to the assistant."""
    return [m for flag in flags for m in (dict(USER), {**ANSWER, **flag})]


@pytest.mark.parametrize(
    ("messages", "assistant", "last"),
    [
        (conversation({}, {}), {1: 1, 3: 1}, {3: 1}),
        (conversation({"train": False}, {}), {3: 1}, {3: 1}),
        (conversation({}, {"train": False}), {1: 1}, {}),
        (conversation({"train": True}, {}), {1: 1, 3: 1}, {1: 1, 3: 1}),
        (conversation({"train": None, "weight": None}, {}), {1: 1, 3: 1}, {3: 1}),
        (conversation({"weight": 0}, {"weight": 0.5}), {3: 0.5}, {3: 0.5}),
        (conversation({"train": True, "weight": 0}, {}), {3: 1}, {3: 1}),
        ([{**USER, "train": True}, ANSWER], {0: 1, 1: 1}, {0: 1, 1: 1}),
        ([*conversation({}), USER], {1: 1}, {1: 1}),
    ],
)
def test_a_message_says_whether_it_is_trained_before_train_on_does(messages, assistant, last):
    assert trained_messages(messages, "assistant") == assistant
    assert trained_messages(messages, "last_assistant") == last


def test_a_prompt_is_not_trained_unless_its_message_says_so():
    messages = conversation({}, {}, {})
    assert trained_messages(messages, "assistant", first=4) == {5: 1}
    messages[1]["train"] = True
    assert trained_messages(messages, "assistant", first=4) == {1: 1, 5: 1}


def test_flags_that_cannot_be_read_are_named():
    for weight in (-1, float("inf"), float("nan"), "0.5"):
        with pytest.raises(ValueError, match=r"message 3 has weight=.*; give a number of 0 or"):
            trained_messages(conversation({}, {"weight": weight}), "assistant")
    for train in ("false", 0.5):
        with pytest.raises(ValueError, match=r"message 1 has train=.*; give true or false"):
            trained_messages(conversation({"train": train}), "assistant")


def test_a_chat_template_sees_neither_flags_nor_nulls():
    flags = {"train": True, "weight": 0.5, "tool_calls": None, "name": "a"}
    assert without_flags([{**ANSWER, **flags}]) == [{**ANSWER, "name": "a"}]
