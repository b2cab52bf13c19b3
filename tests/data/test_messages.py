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


# --- ShareGPT -------------------------------------------------------------------------------------


def test_roles_of_sharegpt_become_those_of_messages():
    turns = from_sharegpt(
        ("system", "a"), ("human", "b"), ("gpt", "c"), ("observation", "d"), ("chatgpt", "e")
    )
    assert [m["role"] for m in turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m["content"] for m in turns] == list("abcde")


@pytest.mark.parametrize("calls", [[CALL], [CALL, {"name": "time", "arguments": {}}]])
def test_a_function_call_becomes_tool_calls(calls):
    value = json.dumps(calls if len(calls) > 1 else calls[0])
    [message] = from_sharegpt(("function_call", value))
    assert message["role"] == "assistant"
    assert message["content"] == ""
    assert [call["function"] for call in message["tool_calls"]] == calls
    assert {call["type"] for call in message["tool_calls"]} == {"function"}


@pytest.mark.parametrize("value", ["weather(Bern)", '{"city": "Bern"}', "[1]", "21", "[]", ""])
def test_a_function_call_that_is_no_json_of_calls_stays_the_text_that_it_is(value):
    assert from_sharegpt(("function_call", value)) == [{"role": "assistant", "content": value}]


def test_a_function_call_stays_text_where_the_template_knows_none():
    value = json.dumps(CALL)
    assert from_sharegpt(("function_call", value), tool_calls=False) == [
        {"role": "assistant", "content": value}
    ]


def test_other_keys_of_a_turn_are_kept():
    [plain] = from_sharegpt(("gpt", "x"), weight=0.5)
    [call] = from_sharegpt(("function_call", json.dumps(CALL)), train=False)
    assert plain["weight"] == 0.5
    assert call["train"] is False


@pytest.mark.parametrize("who", ["alien", None, ""])
def test_an_unknown_speaker_is_named(who):
    with pytest.raises(ValueError, match=rf"message 1 is from {who!r}, which is none of .*rename"):
        from_sharegpt(("human", "Hi"), (who, "x"))


# --- tools ----------------------------------------------------------------------------------------

BARE = {"name": "weather", "parameters": {}}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("null", None),
        ([WRAPPED], [WRAPPED]),
        (json.dumps([WRAPPED]), [WRAPPED]),
    ],
)
def test_tools_are_a_list_or_nothing_and_json_is_read(value, expected):
    assert tools_from_value(value) == expected


@pytest.mark.parametrize("value", [[BARE], json.dumps([BARE]), [WRAPPED]])
def test_bare_functions_of_sharegpt_are_wrapped(value):
    assert tools_from_value(value, sharegpt=True) == [WRAPPED]


@pytest.mark.parametrize("value", ['{"name": "weather"}', "21", '["weather"]', {"a": 1}])
@pytest.mark.parametrize("sharegpt", [True, False])
def test_tools_that_are_no_list_of_tools_are_refused(value, sharegpt):
    with pytest.raises(ValueError, match="'tools' must be a list of dictionaries, got"):
        tools_from_value(value, sharegpt=sharegpt)


# --- bad messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": None}, r"\(user\) has no content; remove the row, or set it"),
        ({"role": "assistant"}, r"\(assistant\) has no content; remove the row"),
        ({"role": "wizard", "content": "x"}, "has the role 'wizard', which is none of .* rename"),
        ({"role": None, "content": "x"}, r"has no role \(keys: \['content', 'role'\]\)"),
        ({"role": "user", "content": 7}, r"\(user\) has int 7 as content; make it a string"),
        ({"role": "user", "content": ["x"]}, r"\(user\) has a list .* no 'type'"),
        ("Hi", "is str 'Hi', not a dictionary with 'role' and 'content'"),
    ],
)
def test_a_bad_message_is_named_with_what_is_wrong(message, complaint):
    with pytest.raises(ValueError, match=r"message 1 of 'prompt' " + complaint):
        check_messages([USER, message], "", what="prompt")


@pytest.mark.parametrize(
    ("messages", "got"),
    [([], r"list \[\]"), (None, r"nothing \(null\)"), ("Hi", "str 'Hi'"), (USER, "dict")],
)
def test_messages_that_are_no_list_of_one_or_more_are_refused(messages, got):
    with pytest.raises(ValueError, match=f"'messages' must be a list of at least one .*got {got}"):
        check_messages(messages, "")


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_role_that_the_template_names_is_known(quote):
    message = {"role": "wizard", "content": "x"}
    check_messages([message], f"{{% if message.role == {quote}wizard{quote} %}}")
    with pytest.raises(ValueError, match="has the role 'wizard'"):
        check_messages([message], "a wizard")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "tool", "content": "21°", "name": "weather"},
    ],
)
def test_good_messages_pass(message):
    check_messages([USER, message], "")


# --- which are trained ----------------------------------------------------------------------------


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
        (conversation({"weight": 2}, {}), {1: 2, 3: 1}, {3: 1}),
        (conversation({"train": True, "weight": 0}, {}), {3: 1}, {3: 1}),
        ([{**USER, "train": True}, ANSWER], {0: 1, 1: 1}, {0: 1, 1: 1}),
        ([USER], {}, {}),
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


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), "0.5", [1]])
def test_a_weight_that_is_no_number_of_zero_or_more_is_named(weight):
    with pytest.raises(ValueError, match=r"message 3 has weight=.*; give a number of 0 or more"):
        trained_messages(conversation({}, {"weight": weight}), "assistant")


@pytest.mark.parametrize("train", ["false", 0.5, "yes"])
def test_a_train_that_is_neither_true_nor_false_is_named(train):
    with pytest.raises(ValueError, match=r"message 1 has train=.*; give true or false"):
        trained_messages(conversation({"train": train}), "assistant")


def test_a_chat_template_sees_neither_flags_nor_nulls():
    [message] = without_flags(
        [{**ANSWER, "train": True, "weight": 0.5, "tool_calls": None, "name": "a"}]
    )
    assert message == {**ANSWER, "name": "a"}
