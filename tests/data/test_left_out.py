"""What a row says reaches the text, or somebody is told: nulls, arguments, roles and thoughts.

Templates are those that TRL ships. A row that loses words is refused by its number, or counted.
"""

from itertools import product

import pytest
from datasets import Dataset, Features, IterableDataset, Json, List
from harness import make_trainer
from helpers.chat_templates import (
    CALL,
    RENDERS_CALLS,
    SENTENCES,
    SHIPPED,
    TOOLS,
    prepared,
    reasoned,
    tokenizer_for,
    turn,
    with_template,
)
from helpers.prepared import call_for
from helpers.runs import prepare_run
from helpers.streams import stream_of
from helpers.tiny import tiny_tokenizer

from trl_packing import load_prepared
from trl_packing.data import counts, row_format, tokenize_rows
from trl_packing.data.chat_template import TEMPLATE_ERRORS, ChatTemplate
from trl_packing.data.row_format import RowFormat
from trl_packing.data.tokenize_rows import documents_from_rows, notes_on_unread

NO_REASONING = "1 document with reasoning that the chat template leaves out"
PARSED = "1 document with arguments of tool calls as JSON text: parsed"


def calling(arguments, **more):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def texts(rows, template, train_on="assistant"):
    chat = ChatTemplate(with_template(template))
    rules = RowFormat(chat, "</s>", train_on=train_on, calls_tools=True)
    return [chat.tokenizer.decode(row["input_ids"]) for row in documents_from_rows(rows, rules)]


# --- nulls ----------------------------------------------------------------------------------------

SHOWS_ALL = """\
{{ 'on' if enable_thinking is not defined or enable_thinking else 'off' }}{{ tools | tojson }}\
{% for m in messages %}{{ m.content }}{{ m.tool_calls | default([]) | tojson }}<|im_end|>\
{% endfor %}{% if add_generation_prompt %}{% endif %}"""


def row_of(key, form="messages", **kwargs):
    tool = {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}
    messages = [turn("user", "Hi"), calling({key: {f"in {key}": 1}})]
    row = {"messages": messages}
    if form == "prompt":
        row = {"prompt": messages[:1], "completion": messages[1:]}
    return {**row, "tools": [{"function": tool}], "chat_template_kwargs": kwargs}


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_keys_of_other_rows_are_written_nowhere(form, monkeypatch, tmp_path):
    rows = [row_of("city", form, enable_thinking=False), row_of("zone", form, effort="low")]
    expected = texts(stream_of(rows), SHOWS_ALL)
    assert "off" in expected[0]
    assert "on" in expected[1]
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    streams = [
        table.to_iterable_dataset(),
        table.to_iterable_dataset().map(lambda row: row),
        IterableDataset.from_parquet(str(tmp_path / "rows.parquet")),
    ]
    for given_rows in (table, *streams):
        assert texts(given_rows, SHOWS_ALL) == expected
    monkeypatch.setattr(tokenize_rows, "without_arrow_nulls", lambda value, feature: value)
    assert "null" in texts(table, SHOWS_ALL)[0], "the control"


def test_nulls_that_somebody_wrote_in_json_stay():
    row = {"messages": [turn("user", "Hi"), calling({"city": None})]}
    rows = Dataset.from_list([row], features=Features({"messages": List(Json())}))
    assert '"city": null' in texts(rows, SHOWS_ALL)[0]
    assert '"city": null' in texts(rows.to_iterable_dataset().map(dict), SHOWS_ALL)[0]


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RENDERS_CALLS, "deepseekv3", "deepseekv3_training"])
def test_arguments_as_json_text_train_as_a_dictionary(name):
    chat = ChatTemplate(tokenizer_for(name))
    rules = RowFormat(chat, "</s>", train_on=None)
    pair = [
        rules.documents({"messages": [turn("user", "Hi"), calling(given)]}, "messages")[0]
        for given in ({"city": "Bern"}, '{"city": "Bern"}')
    ]
    assert pair[0].text == pair[1].text
    assert "Bern" in pair[0].text
    assert r"\"" not in pair[0].text
    takes_text = name in ("qwen3", "deepseekv3")
    assert [bool(each.handled) for each in pair] == [False, not takes_text]
    broken = {"messages": [turn("user", "Hi"), calling('{"city"')]}
    if takes_text:
        assert rules.documents(broken, "messages")[0].handled, "counted, as it is"
    else:
        with pytest.raises(ValueError, match=r"message 1 has str .* as arguments of a tool call"):
            rules.documents(broken, "messages")
    nothing = {"messages": [turn("user", "Hi"), calling("")]}
    assert "weather" in rules.documents(nothing, "messages")[0].text


def test_the_template_for_rows_with_tools_decides_on_arguments():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = with_template(plain)
    tokenizer.chat_template = {"default": plain, "tool_use": SHOWS_ALL}
    row = {"messages": [turn("user", "Hi"), calling('{"city": "Bern"}')], "tools": [{"name": "f"}]}
    [document] = RowFormat(ChatTemplate(tokenizer), "</s>").documents(row, "messages")
    assert '"arguments": {"city": "Bern"}' in document.text


@pytest.mark.parametrize("streamed", [False, True])
def test_the_report_counts_parsed_arguments_and_lost_reasoning(tmp_path, caplog, streamed):
    tokenizer = tokenizer_for("qwen2_5")
    thoughts = [turn("user", "Hi"), reasoned("Hello", "a greeting", "reasoning_content")]
    rows = [{"messages": m} for m in ([turn("user", "Hi"), calling("{}")], thoughts, SENTENCES)]
    given_rows = stream_of(rows) if streamed else rows
    trainer = make_trainer(
        tmp_path, given_rows, tokenizer=tokenizer, max_length=256, max_steps=1, train_on="all"
    )
    trainer.train()
    for words in (PARSED, NO_REASONING):
        assert caplog.text.count(words) == 1
        assert words in " ".join(str(trainer.packing_report).split())


# --- words that the text lacks --------------------------------------------------------------------

BRIEF = turn("developer", "Be brief.")
THOUGHTS = [turn("user", "2 + 2"), reasoned("Four.", "two twos", "reasoning_content")]
BESIDE = [turn("user", "Hi"), {**TOOLS[1], "content": "One moment."}, *TOOLS[2:]]
SETTINGS = [{"train_on": "assistant"}, {"train_on": None}, {"train_on": "every_turn"}]
MARKS = {"train_on": None, "assistant_only": True}
LOST = [
    *((name, [BRIEF, *SENTENCES], each, r"content of message 0 .*'developer'; rename the role")
      for name in ("qwen2_5", "qwen3", "phi3", "cohere2", "glm4moe") for each in SETTINGS),
    ("qwen3_training", [BRIEF, *SENTENCES], MARKS, r"content of message 0 \('Be brief\.'\)"),
    ("qwen3", [turn("developer", "user"), *SENTENCES], SETTINGS[0], r"content of message 0"),
    ("phi3_training", TOOLS, SETTINGS[0], r"tool call of message 1 \('weather'\)"),
    ("phi3_training", TOOLS, MARKS, r"tool call of message 1 \('weather'\); use a template"),
    ("llama3", TOOLS, SETTINGS[1], r"tool call of message 1 \('weather'\); use a template"),
    ("qwen2_5_training", THOUGHTS, SETTINGS[0], r"reasoning of message 1 .*into the content"),
    ("llama3_1", BESIDE, SETTINGS[0], r"content of message 1 \('One moment"),
    *(("qwen3_8", [turn("user", "Hi"), turn("assistant", content)], each,
       r"thoughts of its own .* message 1 .*move them into 'reasoning_content'")
      for content in ("<think>\nHm.\n</think>\n\nHello", "Hm.\n</think>\nHello")
      for each in SETTINGS[:2]),
    ("qwen3", [turn("user", "Hi"), {"role": "assistant", "content": None, "function_call": CALL}],
     SETTINGS[1], "has its call under 'function_call', .*make it 'tool_calls'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "messages", "options", "words"), LOST)
def test_a_message_whose_words_do_not_reach_the_text_is_refused(name, messages, options, words):
    chat = ChatTemplate(tokenizer_for(name))
    with pytest.raises(ValueError, match=rf"row 0 of the train dataset: .*{words}"):
        prepared(chat, [messages], **options)


COUNTED = [
    ("qwen2_5_training", THOUGHTS, MARKS),
    ("qwen3", [*THOUGHTS, *SENTENCES], {"train_on": None}),  # reasoning of an earlier turn
    ("llama3_1", BESIDE, {"train_on": None}),
]


@pytest.mark.parametrize(("name", "messages", "options"), COUNTED)
def test_parts_that_trl_trains_without_are_counted(name, messages, options):
    rules = RowFormat(ChatTemplate(tokenizer_for(name)), "</s>", **options)
    [document] = rules.documents({"messages": messages}, "messages")
    assert document.handled
    [last] = rules.documents({"messages": SENTENCES}, "messages")
    assert not last.handled


HARMLESS = [
    ("llama3_1", [*TOOLS[:2], turn("tool", 'a "quote"\nand a line'), TOOLS[3]]),  # written as JSON
    ("qwen3", [turn("user", "  Hi\n"), turn("assistant", "\n\nHello ")]),  # stripped
    ("gemma3", [turn("system", "Be brief."), *SENTENCES]),  # in the turn of the user
    ("qwen3", [turn("user", "</think> is a tag"), turn("assistant", "Yes")]),
]


@pytest.mark.parametrize(("name", "messages"), HARMLESS)
@pytest.mark.parametrize("options", SETTINGS[:2])
def test_words_that_a_template_writes_otherwise_are_not_lost(name, messages, options):
    [document] = prepared(ChatTemplate(tokenizer_for(name)), [messages], **options)
    assert len(document["input_ids"])


# --- columns beside the conversation --------------------------------------------------------------


PARTS_BESIDE = [
    ({"messages": SENTENCES, "system": "Be brief."}, {}, "system"),
    ({"query": "a", "response": "b", "history": [["c", "d"]]}, {"prompt_template": "qa"}, "hi"),
    ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, {}, "tools"),
    ({"messages": SENTENCES, "system": ""}, {}, None),
    ({"messages": SENTENCES, "tools": [CALL]}, {}, None),
    ({"query": "a", "response": "b", "system": "c"},
     {"prompt_template": "{system} {query}"}, None),
    ({"text": "a", "system": "Be brief."}, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "column"), PARTS_BESIDE)
def test_columns_with_parts_of_a_conversation_are_named(tmp_path, caplog, row, options, column):
    for rows in ([row] * 4, stream_of([row] * 4)):
        caplog.clear()
        make_trainer(tmp_path, rows, tokenizer=tiny_tokenizer(chat=True), max_steps=1, **options)
        assert ("look like parts of the conversation" in caplog.text) == (column is not None)
        assert column is None or f"has '{column}" in caplog.text


def test_only_rows_of_the_data_set_have_values_that_are_not_read():
    rows = [{"text": "a", "prompt": "b", "completion": "c", "system": said} for said in ("", "Hi")]
    row_format = RowFormat(ChatTemplate(tiny_tokenizer()), "<eos>")
    whole = Dataset.from_list(rows)
    assert len(notes_on_unread(whole, row_format, "train")) == 1
    assert notes_on_unread(whole.select([0]), row_format, "train") == []


# --- every template, form and mode ----------------------------------------------------------------


def called(number):
    arguments = f'{{"place": "town{number}"}}'
    function = {"name": f"tool{number}", "arguments": arguments}
    call = {"type": "function", "id": "call00001", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def talk(*messages):
    return [*messages, turn("user", "ask8"), turn("assistant", "say9")]


FOUND_2 = {**turn("tool", "found2"), "name": "tool1"}
SAY_3 = turn("assistant", "say3")
# Every word ends in the number of its message; thoughts are called so.
HOLDS = {
    "plain": talk(turn("system", "rule0"), turn("user", "ask1"), turn("assistant", "say2")),
    "developer": talk(turn("developer", "rule0"), turn("user", "ask1"), turn("assistant", "say2")),
    "thoughts": talk(turn("user", "ask0"), reasoned("say1", "thought1", "reasoning_content")),
    "in content": talk(
        turn("user", "ask0"), turn("assistant", "<think>\nthought1\n</think>\n\nsay1")
    ),
    "calls": talk(turn("user", "ask0"), called(1), FOUND_2, SAY_3),
    "beside": talk(
        turn("user", "ask0"), {**called(1), "content": "say1"}, FOUND_2,
        SAY_3,
    ),
    "calls and thoughts": [
        turn("user", "ask0"), {**called(1), "reasoning_content": "thought1"},
        FOUND_2, reasoned("say3", "thought3", "reasoning_content"),
    ],
}  # fmt: skip
MODES = [
    *({"train_on": each} for each in (None, "all", "assistant", "last_assistant", "every_turn")),
    MARKS,
]

FORMS = ("messages", "prompt messages")

STEMS = ("rule", "ask", "say", "thought", "found", "town", "tool")
WORDS = [f"{stem}{number}" for stem in STEMS for number in range(10)]


def words_of(message):
    return {word for word in WORDS if word in str(message)}


def in_form(messages, form):
    if form == "messages":
        return {"messages": messages}
    first = [message["role"] for message in messages].index("assistant")
    return {"prompt": messages[:first], "completion": messages[first:]}


LOST = counts.NO_REASONING | counts.NO_WORDS


def outcome(chat, messages, options, form="messages"):
    """Assert that no word of a row is lost silently; return what happened to the row."""
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        documents = RowFormat(chat, "</s>", **options).documents(in_form(messages, form), form)
    except (ValueError, RuntimeError, *TEMPLATE_ERRORS):
        return "refused"
    text = "".join(document.text for document in documents)
    shown = words_of(text)
    by_turn = options["train_on"] in ("assistant", "last_assistant", "every_turn")
    chosen = answers[-1:] if options["train_on"] == "last_assistant" else answers
    lost = set()
    for number, message in enumerate(messages):
        missing = words_of(message) - shown
        if by_turn and number not in chosen:  # earlier thoughts are not read at inference
            missing = {word for word in missing if "thought" not in word}
        lost |= missing
    counted = any(document.handled & LOST for document in documents)
    assert counted or not lost, f"{lost} are lost silently"
    if by_turn:
        spans = [(d.text[a:b]) for d in documents for a, b, _ in d.spans or ()]
        trained = words_of("".join(spans))
        wanted = set().union(*(words_of(messages[n]) for n in chosen)) - lost
        assert trained == wanted
    return "counted" if lost else "whole"


def outcomes(names, modes=MODES):
    found = {}
    for name in names:
        chat = ChatTemplate(tokenizer_for(name))
        for case, messages in HOLDS.items():
            for options in modes:
                for form in FORMS:
                    found[name, case, str(options), form] = outcome(chat, messages, options, form)
    return found


def tokens(documents):
    return [[list(row[name]) for name in ("input_ids", "labels")] for row in documents]


def assert_all_ways_are_one(name, found, folder):
    """Rows alone, in a table, in a stream and in a prepared folder are the same tokens."""
    chat = ChatTemplate(tokenizer_for(name))
    for number, (options, form) in enumerate(product(MODES, FORMS)):
        kept = [k for k in HOLDS if found[name, k, str(options), form] != "refused"]
        rows = [in_form(HOLDS[case], form) for case in kept]
        rules = RowFormat(chat, chat.tokenizer.eos_token, **options)
        if not rows:
            continue
        alone = [documents_from_rows(Dataset.from_list([row]), rules) for row in rows]
        expected = [document for documents in alone for document in tokens(documents)]
        table = Dataset.from_list(rows)
        stream = table.to_iterable_dataset()
        for each in (table, stream):
            assert tokens(documents_from_rows(each, rules)) == expected
        if options is MARKS:  # `prepare` refuses assistant_only_loss
            continue
        call = call_for(table, tokenizer=chat.tokenizer, max_length=None, **options)
        prepare_run(call, folder / str(number))
        assert tokens(load_prepared(folder / str(number))) == expected


def test_no_word_of_a_row_is_lost_silently(monkeypatch, tmp_path):
    names = ["qwen3", "llama3_1", "gptoss"]
    found = outcomes(names)
    assert {*found.values()} == {"whole", "counted", "refused"}
    assert found["qwen3", "plain", str(MODES[2]), "messages"] == "whole"
    assert_all_ways_are_one("qwen3", found, tmp_path)
    monkeypatch.setattr(row_format, "left_out", lambda *row: [])
    with pytest.raises(AssertionError, match="lost silently"):
        outcomes(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.jinja")))
def test_no_word_is_lost_silently_by_any_template(name, tmp_path):
    found = outcomes([name])
    assert len(found) == len(HOLDS) * len(MODES) * 2
    assert_all_ways_are_one(name, found, tmp_path)
