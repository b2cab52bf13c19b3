"""ShareGPT becomes messages, bad messages are named, flags that cannot be read are, too."""

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


def test_roles_of_sharegpt_become_those_of_messages():
    roles = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool"}
    turns = [{"from": who, "value": who, "weight": 0.5} for who in roles]
    expected = [{"role": r, "content": who, "weight": 0.5} for who, r in roles.items()]
    assert messages_from_sharegpt(turns, tool_calls=True) == expected


CALLS_AS_TEXT = [
    (json.dumps(CALL), [CALL]),
    (json.dumps([CALL, {"name": "time"}]), [CALL, {"arguments": {}, "name": "time"}]),
    *((text, None) for text in ("weather(Bern)", '{"city": "Bern"}', "[1]", "[]")),
]


@pytest.mark.parametrize(("value", "calls"), CALLS_AS_TEXT)
def test_a_function_call_becomes_tool_calls_or_stays_text(value, calls):
    turns = [{"from": "function_call", "value": value}]
    text = [{"role": "assistant", "content": value}]
    assert messages_from_sharegpt(turns, tool_calls=False) == text
    made = [{"type": "function", "function": call} for call in calls or ()]
    expected = [{"role": "assistant", "content": "", "tool_calls": made}] if calls else text
    assert messages_from_sharegpt(turns, tool_calls=True) == expected


def test_tools_are_a_list_or_nothing_and_json_is_read():
    bare = {"name": "weather", "parameters": {}}
    wrapped = {"type": "function", "function": bare}
    for nothing in (None, "", "null", []):
        assert tools_from_value(nothing) is None
    assert tools_from_value(json.dumps([wrapped])) == [wrapped]
    for tools in ([bare], json.dumps([bare]), [wrapped]):
        assert tools_from_value(tools, sharegpt=True) == [wrapped]
    for wrong in ('{"name": "weather"}', '["weather"]', "[x"):
        with pytest.raises(ValueError, match="'tools' must be a list of dictionaries"):
            tools_from_value(wrong)


def test_good_messages_pass():
    good = [
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "wizard", "content": "named by the template"},
    ]
    check_messages(good, "{% if message.role == 'wizard' %}")
    with pytest.raises(ValueError, match="'messages' must be a list of messages"):
        check_messages(USER, "")


def test_a_user_is_trained_where_a_flag_says_so_also_in_a_prompt():
    messages = [USER | {"train": True}, ANSWER, USER]
    assert trained_messages(messages, "last_assistant") == {0: 1, 1: 1}
    assert trained_messages(messages, "last_assistant", first=3) == {0: 1}


@pytest.mark.parametrize("flag", [{"weight": -1}, {"weight": float("nan")}, {"train": "false"}])
def test_flags_that_cannot_be_read_are_named(flag):
    with pytest.raises(ValueError, match=r"message 1 has (weight|train)=.*; give "):
        trained_messages([USER, ANSWER | flag], "assistant")


def test_a_chat_template_sees_neither_flags_nor_nulls():
    flags = {"train": True, "weight": 0.5, "tool_calls": None, "name": "a"}
    assert without_flags([{**ANSWER, **flags}]) == [{**ANSWER, "name": "a"}]
