"""The assistant's text is found in any chat template, and nothing else is trained.

The templates are those that TRL ships for its families of models, and six published formats written
out below. Every conversation goes the whole way: rows, text, tokens, labels, decoded again.
"""

import itertools

import numpy as np
import pytest
from harness import make_trainer
from helpers.chat_templates import (
    FORMATS,
    MARKED,
    RENDERS_CALLS,
    SENTENCES,
    SHIPPED,
    THREE,
    TOOLS,
    conversations,
    prepared,
    reasoned,
    source_of,
    tokenizer_for,
    turn,
    with_template,
)
from helpers.merging import sentence_tokenizer
from helpers.tiny import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data import row_format
from trl_packing.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, Conversation
from trl_packing.data.responses import ResponseTemplate
from trl_packing.data.turns import trained_spans


def trained(chat: ChatTemplate, rows, train_on="assistant") -> list[list[str]]:
    """The decoded runs of trained tokens of every row."""
    found = []
    for row in prepared(chat, rows, train_on):
        mask = row["labels"] != -100
        runs = np.split(row["input_ids"], np.flatnonzero(np.diff(mask)) + 1)
        found.append([chat.tokenizer.decode(run) for run in (runs if mask[0] else runs[1:])[::2]])
    return found


def assert_turns(name: str, chat: ChatTemplate, conversations) -> None:
    """Assert that the trained tokens are what assistants say and their stop tokens."""
    expects = FORMATS[name]
    for messages, runs in zip(conversations, trained(chat, conversations), strict=True):
        contents = [m["content"] for m in messages if m["role"] == "assistant"]
        wanted = [
            expects.written(content, turn == len(contents) - 1)
            for turn, content in enumerate(contents)
        ]
        assert runs == wanted


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_trained_spans_are_the_contents_of_the_assistant_and_stop_tokens(name, data):
    rows = data.draw(st.lists(conversations(FORMATS[name].system), min_size=1, max_size=4))
    assert_turns(name, ChatTemplate(tokenizer_for(name)), rows)


@pytest.mark.parametrize("name", ["chatml", "alpaca"])
def test_a_stop_that_is_no_token_of_the_tokenizer_is_trained_as_the_words_that_it_is(name):
    tokenizer = sentence_tokenizer()
    tokenizer.chat_template = source_of(name).replace("eos_token", "'[END]'")
    stop = "<|im_end|>" if name == "chatml" else "[END]"
    messages = [*SENTENCES, turn("user", ""), turn("assistant", "")]
    text, spans = trained_spans(ChatTemplate(tokenizer), Conversation(messages), {1: 1.0, 3: 1.0})
    assert [text[a:b] for a, b, _ in spans] == ["Hello" + stop, stop]


# --- which turns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMATS, *MARKED])
def test_messages_say_whether_they_are_trained_and_how_much(name):
    chat = ChatTemplate(tokenizer_for(name))
    [every], [last] = trained(chat, [THREE]), trained(chat, [THREE], "last_assistant")
    assert len(every) == 3
    assert last == every[-1:]
    for flags in ((False, None, True), (True, False, False), (True, None, False)):
        flagged = [{**m, "train": flags[n // 2]} if n % 2 else m for n, m in enumerate(THREE)]
        wanted = [text for text, flag in zip(every, flags, strict=True) if flag is not False]
        assert "".join(trained(chat, [flagged])[0]) == "".join(wanted)
    assert trained(chat, [flagged], "last_assistant") == [every[:1]], "flags count first"
    weights = (0.5, 0.0, 2.0)
    weighted = [{**m, "weight": weights[n // 2]} if n % 2 else m for n, m in enumerate(THREE)]
    [row] = prepared(chat, [weighted])
    for weight, text in zip((0.5, 2.0), (every[0], every[2]), strict=True):
        assert chat.tokenizer.decode(row["input_ids"][row["loss_weights"] == weight]) == text
    assert ((row["labels"] != -100) == (row["loss_weights"] > 0)).all()


# --- {% generation %} -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_marked_turns_are_those_of_trl_token_by_token(name, data):
    tokenizer = tokenizer_for(name)
    messages = data.draw(conversations(not name.startswith("gemma_")))
    assert_marked_as_by_trl(tokenizer, messages)
    if name == "diffusion_gemma_training":  # a last character of several tokens
        assert_marked_as_by_trl(tokenizer, [turn("user", ""), turn("assistant", "aÀ")])


def assert_marked_as_by_trl(tokenizer, messages):
    [row] = prepared(ChatTemplate(tokenizer), [messages])
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = theirs["assistant_masks"]
    chars = theirs.encodings[0].offsets
    # Of a last character of several tokens they take only the first, which may begin before it.
    for n, ((_, end), (start, last)) in enumerate(itertools.pairwise(chars), 1):
        expected[n] |= expected[n - 1] and start < last == end
    assert row["input_ids"].tolist() == theirs["input_ids"]
    assert (row["labels"] != -100).tolist() == expected


# --- where a model begins to write ---------------------------------------------------------------

BREAKS = [m for _ in "12" for m in (turn("user", "Hi"), turn("assistant", "\nHello"))]
# Marks behind the space that the model writes: the generation prompt ends before it.
SPACED = """\
{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '\n' }}{% else %}A: \
{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}\
{{ 'A:' if add_generation_prompt }}"""


@pytest.mark.parametrize("name", ["chatml", "alpaca", "phi3", "qwen2_5_training", "phi3_training"])
@pytest.mark.parametrize("train_on", ["assistant", None])
def test_no_token_holds_the_end_of_a_prompt_and_the_beginning_of_an_answer(name, train_on):
    chat = ChatTemplate(with_template(source_of(name), merges_lines=True))
    settings = {}
    if train_on is None:
        settings = {"assistant_only": True}
        if name not in MARKED:
            header = chat.render(Conversation(BREAKS)).partition("\nHello")[0][-5:]
            settings = {"answers": ResponseTemplate(chat.tokenizer, header, None)}
    [row] = prepared(chat, [BREAKS], train_on, **settings)
    text = chat.render(Conversation(BREAKS))
    [two] = chat.tokenizer.encode("\n\n")
    merged = text.count("\n\nHello") - ("answers" in settings)  # it trains the last answer
    assert merged > 0
    whole = chat.tokenizer.encode(text, add_special_tokens=False)
    assert list(row["input_ids"]).count(two) == whole.count(two) - merged
    assert chat.tokenizer.decode(row["input_ids"]) == text
    assert (
        chat.tokenizer.decode(row["input_ids"][row["labels"] != -100]).lstrip("\n")[:5] == "Hello"
    )
    if train_on == "assistant":
        prompt = chat.tokenizer.apply_chat_template(BREAKS[:1], add_generation_prompt=True)
        assert row["input_ids"][: len(prompt["input_ids"])].tolist() == prompt["input_ids"]


@pytest.mark.parametrize("name", ["phi3", "phi3_training"])
def test_a_special_token_that_takes_in_the_space_of_an_answer_is_not_trained(name):
    tokenizer = with_template(source_of(name), swallows="<|assistant|>")
    for train_on in ("assistant", None):
        if train_on is None and name == "phi3":  # it has no marks
            continue
        settings = {"assistant_only": train_on is None}
        [row] = prepared(ChatTemplate(tokenizer), [BREAKS], train_on, **settings)
        header = row["input_ids"] == tokenizer.convert_tokens_to_ids("<|assistant|>")
        assert header.sum() == 2
        assert (row["labels"][header] == -100).all()
        assert tokenizer.decode(row["labels"][row["labels"] != -100]).startswith("Hello")


def test_a_token_that_a_model_writes_whole_stays_whole():
    tokenizer = with_template(SPACED)
    messages = [turn("user", "Hi"), turn("assistant", "the answer")]
    [row] = prepared(ChatTemplate(tokenizer), [messages])
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert row["input_ids"].tolist() == theirs["input_ids"]
    assert tokenizer.decode(row["input_ids"][row["labels"] != -100]) == " the answer</s>"


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RENDERS_CALLS)
def test_calls_are_trained_and_what_tools_answer_is_not(name):
    chat = ChatTemplate(tokenizer_for(name))
    [runs] = trained(chat, [TOOLS])
    for words, run in zip((("weather", "Bern"), ("It is cold.",), ("Hello",)), runs, strict=True):
        assert all(word in run for word in words)
        assert not any(word in run for word in ("minus", "nine", "How"))
    for wanted in (1, 3, 5):
        flagged = [{**m, "train": n == wanted} for n, m in enumerate(TOOLS)]
        assert trained(chat, [flagged]) == [[runs[wanted // 2]]]


def refusal(name: str, messages, train_on: str = "assistant") -> str:
    with pytest.raises(ValueError) as error:
        trained(ChatTemplate(tokenizer_for(name)), [SENTENCES, messages], train_on)
    return str(error.value)


MUTE = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content if m.role == 'user' }}\n"


def test_a_template_that_drops_contents_is_refused():
    with pytest.raises(ValueError, match=r"row 0 of .*leaves out the content of message 1 \('Hel"):
        trained(ChatTemplate(with_template(MUTE + "<|im_end|>{% endfor %}")), [SENTENCES])


# --- reasoning ------------------------------------------------------------------------------------

THINKING = ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "gptoss", "muse_glimmer"]


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_the_reasoning_of_the_last_turn_is_trained(name, key):
    messages = [*SENTENCES, turn("user", "2 + 2"), reasoned("It is 4.", "two twos", key)]
    [runs] = trained(ChatTemplate(tokenizer_for(name)), [messages], "last_assistant")
    said = "".join(runs)
    assert said.index("two twos") < said.index("It is 4.")
    assert "Hello" not in said


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss"])
@pytest.mark.parametrize("reasoning", ["two twos", "4"])  # the answer may say it again
def test_reasoning_that_a_template_strips_from_earlier_turns_is_refused(name, reasoning):
    messages = [turn("user", "2 + 2"), reasoned("It is 4.", reasoning, "reasoning_content")]
    complaint = refusal(name, [*messages, *SENTENCES])
    assert "row 1 of the train dataset: the chat template leaves out the reas" in complaint
    assert f"of message 1 ({reasoning!r})" in complaint
    [runs] = trained(ChatTemplate(tokenizer_for(name)), [[*messages, *SENTENCES]], "last_assistant")
    assert "Hello" in "".join(runs)


def test_what_an_argument_of_the_template_puts_into_the_prompt_is_not_trained():
    chat = ChatTemplate(tokenizer_for("qwen3"))
    rows = [{"messages": SENTENCES, "chat_template_kwargs": {"enable_thinking": False}}]
    assert trained(chat, rows) == [["Hello<|im_end|>"]]
    assert trained(chat, [SENTENCES]) == [["<think>\n\n</think>\n\nHello<|im_end|>"]]


def test_thoughts_written_into_the_content_count_as_reasoning():
    content = "<think>\ntwo twos\n</think>\n\nIt is 4."
    messages = [turn("user", "2 + 2"), turn("assistant", content)]
    [runs] = trained(ChatTemplate(tokenizer_for("qwen3")), [messages])
    assert runs == [content + "<|im_end|>"]
    assert "leaves out the reasoning of message 1" in refusal("qwen3", [*messages, *SENTENCES])


# --- the checks can fail --------------------------------------------------------------------------


def growing_prefixes(chat, conversation, weights):
    """Spans as many take them: what each message adds to the text of those before it."""

    def first(number, **prompt):
        return chat.render(conversation.of(conversation.messages[:number]), **prompt)

    spans = [
        (len(first(n, generation_prompt=True)), len(first(n + 1)), weights[n]) for n in weights
    ]
    return chat.render(conversation), spans


def shifted(chat, conversation, weights):
    text, spans = trained_spans(chat, conversation, weights)
    return text, [(start + 1, stop + 1, weight) for start, stop, weight in spans]


@pytest.mark.parametrize("wrong", [shifted, growing_prefixes])
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "phi3", "chatml"])
def test_other_spans_are_noticed(name, wrong, monkeypatch):
    chat = ChatTemplate(tokenizer_for(name))
    assert_turns(name, chat, [THREE])
    monkeypatch.setattr(row_format, "trained_spans", wrong)
    with pytest.raises(AssertionError):
        assert_turns(name, chat, [THREE])


# --- rendered by the compiled template ------------------------------------------------------------

SHORT_CHATS = [
    [turn("user", "Hi")],
    [turn("user", " Hi\n"), turn("assistant", "<b>Yes & no</b>\n")],
    [
        *(turn("system", "Be brief."), turn("user", "")),
        turn("assistant", "<think>\nhm\n</think>\n\nSo."),
        turn("user", "{{ messages }} {% raw %}"),
    ],
]


@pytest.mark.parametrize("template", sorted(p.stem for p in SHIPPED.glob("*.jinja")))
def test_plain_texts_render_as_apply_chat_template_does(template):
    tokenizer = with_template((SHIPPED / f"{template}.jinja").read_text())
    ours = ChatTemplate(tokenizer)
    for messages, prompt in itertools.product(SHORT_CHATS, [False, True]):
        asked = {"tokenize": False, "add_generation_prompt": prompt}
        try:
            expected = tokenizer.apply_chat_template(messages, **asked)
        except TEMPLATE_ERRORS as error:
            with pytest.raises(type(error)):
                ours.render(Conversation(messages), generation_prompt=prompt)
        else:
            assert ours.render(Conversation(messages), generation_prompt=prompt) == expected


def test_a_template_that_would_not_end_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template += "{{ 'x' * 10**10 }}"
    with pytest.raises(ValueError, match="a power, or a number above"):
        make_trainer(tmp_path, [{"messages": SENTENCES}], tokenizer=tokenizer)
