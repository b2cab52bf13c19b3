"""The assistant's text is found in any chat template, and nothing else is trained.

The templates are those that TRL ships for its families of models, and six published formats written
out below. Every conversation goes the whole way: rows, text, tokens, labels, decoded again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from datasets import Dataset
from helpers.merging import sentence_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_packing.formatting import row_format
from trl_packing.formatting.chat_template import TEMPLATE_ERRORS, ChatTemplate, Conversation
from trl_packing.formatting.message_spans import find_message_spans
from trl_packing.formatting.row_format import RowFormat
from trl_packing.formatting.tokenize_rows import documents_from_rows

SHIPPED = Path(trl.__file__).parent / "chat_templates"

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] +
'<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}\
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}\
{% for message in rest %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + ((system if loop.first else '') + message['content']).strip() +
' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}\
{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

ZEPHYR = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token
+ '\\n' }}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}\
{% endfor %}"""

ALPACA = """\
{% for message in messages %}{% if message['role'] == 'assistant' %}\
{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% else %}\
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""

SMOLLM_2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

WRITTEN = {
    "chatml": CHATML,
    "llama 2": LLAMA_2,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "alpaca": ALPACA,
    "smollm 2": SMOLLM_2,
}


@dataclass(frozen=True)
class Format:
    """The trained part of a turn: `written`, from its content and whether it is the last one."""

    written: Callable[[str, bool], str]
    system: bool = True  # whether it takes a system message


def ends(stop: str, trim: Callable[[str], str] = str) -> Callable[[str, bool], str]:
    return lambda content, last: trim(content) + stop


def space_first(stop: str) -> Callable[[str, bool], str]:  # and no generation prompt that has it
    return lambda content, last: " " + content.strip() + stop


def qwen3(content: str, last: bool) -> str:
    thoughts = "<think>\n\n</think>\n\n" + content.lstrip("\n")
    return (thoughts if last else content) + "<|im_end|>"


def qwen3_5(content: str, last: bool) -> str:  # "<think>\n" is in its generation prompt
    return ("\n</think>\n\n" if last else "") + content.strip() + "<|im_end|>"


def glm4(content: str, last: bool) -> str:  # a turn ends where the next begins
    words = "\n" + content.strip() if content.strip() else ""
    return "\n<think></think>" + words + ("" if last else "<|user|>")


def gptoss(content: str, last: bool) -> str:
    return "<|channel|>final<|message|>" + content + ("<|return|>" if last else "<|end|>")


def muse(content: str, last: bool) -> str:
    return " to=user<|message|>" + content + "<|eot|>"


FORMATS = {
    "qwen2_5": Format(ends("<|im_end|>")),
    "qwen3": Format(qwen3),
    "qwen3_5_think": Format(qwen3_5),
    "llama3": Format(ends("<|eot_id|>", str.strip)),
    "llama3_1": Format(ends("<|eot_id|>", str.strip)),
    "gemma": Format(ends("<end_of_turn>", str.strip), system=False),
    "gemma3": Format(ends("<end_of_turn>", str.strip)),
    "gemma4": Format(ends("<turn|>", str.strip)),
    "phi3": Format(ends("<|end|>")),
    "cohere": Format(ends("<|END_OF_TURN_TOKEN|>", str.strip)),
    "cohere2": Format(ends("<|END_RESPONSE|>")),
    "deepseekv3": Format(ends("<｜end▁of▁sentence｜>")),
    "glm4moe": Format(glm4),
    "gptoss": Format(gptoss),
    "lfm2_v2": Format(ends("<|im_end|>")),
    "lfm2_2_5": Format(ends("<|im_end|>\n")),  # it marks what it wants trained
    "nemotron_3_nano": Format(ends("<|im_end|>", str.rstrip)),
    "muse_glimmer": Format(muse),
    "chatml": Format(ends("<|im_end|>")),
    "llama 2": Format(space_first(" </s>")),
    "mistral": Format(space_first("</s>"), system=False),
    "zephyr": Format(ends("</s>")),
    "alpaca": Format(ends("</s>")),
    "smollm 2": Format(ends("<|im_end|>")),
}

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]+?[|｜]>|<(?:start_of_turn|end_of_turn|turn\||\|turn|sop)>|<turn\|>|<\|turn>"
)


@cache
def _words() -> str:
    """A byte-level BPE that knows some words; no token of it holds two line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the assistant answers the user system naïve 東京"] * 3, trainer)
    return tokenizer.to_str()


def source_of(name: str) -> str:
    return WRITTEN.get(name) or (SHIPPED / f"{name}.jinja").read_text()


@cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens that the template writes, as its model's has them."""
    return with_template(source_of(name))


def with_template(source: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_words())
    special = ["<s>", "</s>", *sorted(set(_SPECIAL.findall(source)) - {"<|user|>", "<|system|>"})]
    if "[gMASK]" in source:  # GLM's roles are tokens, Zephyr's are not
        special += ["<|user|>", "<|system|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=source
    )


# --- the whole way --------------------------------------------------------------------------------


def prepared(chat: ChatTemplate, rows, train_on="assistant", **settings) -> list[dict[str, Any]]:
    row_format = RowFormat(chat, chat.tokenizer.eos_token, train_on=train_on, **settings)
    rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    return list(documents_from_rows(Dataset.from_list(rows), row_format).with_format("numpy"))


def trained(chat: ChatTemplate, rows, train_on="assistant") -> list[list[str]]:
    """The decoded runs of trained tokens of every row."""
    return [runs_of(chat.tokenizer, row) for row in prepared(chat, rows, train_on)]


def runs_of(tokenizer, row) -> list[str]:
    mask = row["labels"] != -100
    runs = np.split(row["input_ids"], np.flatnonzero(np.diff(mask)) + 1)
    return [tokenizer.decode(run) for run in (runs[0::2] if mask[0] else runs[1::2])]


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


# Words of the templates themselves, space that some of them strip, and the stop tokens of others.
_fragments = st.sampled_from(
    [
        *("assistant", "user", "system", "<", "s", "|", "a", " ", "\n", "\n\n", "Hello", "model"),
        *("🦙", "東京", "naïve", "\uf8ff", "[INST]", "### Response:", "<|im_end|>", "</s>", "{{"),
    ]
)
contents = st.lists(st.one_of(_fragments, st.text(max_size=4)), max_size=5).map("".join)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@st.composite
def conversations(draw, system: bool) -> list[dict[str, str]]:
    same = draw(st.none() | contents)
    said = st.just(same) if same is not None else contents
    messages = [turn("system", draw(said))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += [turn("user", draw(said)), turn("assistant", draw(said))]
    return messages


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_trained_spans_are_the_contents_of_the_assistant_and_stop_tokens(name, data):
    rows = data.draw(st.lists(conversations(FORMATS[name].system), min_size=1, max_size=4))
    assert_turns(name, ChatTemplate(tokenizer_for(name)), rows)


SENTENCES = [turn("user", "Hi"), turn("assistant", "Hello")]


@pytest.mark.parametrize("name", ["chatml", "llama 2", "mistral", "zephyr", "alpaca"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sentencepiece_tokens_are_trained_if_they_hold_what_the_assistant_says(name, data):
    tokenizer = sentence_tokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<|im_end|>"]}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = source_of(name)
    messages = data.draw(conversations(FORMATS[name].system))
    [row] = prepared(ChatTemplate(tokenizer), [messages])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    _, spans = find_message_spans(
        ChatTemplate(tokenizer), Conversation(messages), assistants(messages)
    )
    held = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    expected = [
        any(max(begin, start) < min(end, stop) for [(start, stop)] in spans.values())
        for begin, end in held
    ]
    assert (row["labels"] != -100).tolist() == expected
    for number, [(start, stop)] in spans.items():
        content = messages[number]["content"]
        assert text[start:stop] == FORMATS[name].written(content, number == len(messages) - 1)


@pytest.mark.parametrize("name", ["chatml", "alpaca"])
def test_a_stop_that_is_no_token_of_the_tokenizer_is_trained_as_the_words_that_it_is(name):
    tokenizer = sentence_tokenizer()
    tokenizer.chat_template = source_of(name).replace("eos_token", "'[END]'")
    stop = "<|im_end|>" if name == "chatml" else "[END]"
    messages = [*SENTENCES, turn("user", ""), turn("assistant", "")]
    text, spans = find_message_spans(ChatTemplate(tokenizer), Conversation(messages), [1, 3])
    assert [text[start:stop] for [(start, stop)] in spans.values()] == ["Hello" + stop, stop]


def assistants(messages) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_turn_is_the_same_whether_others_are_wanted_or_not(name, data):
    chat = ChatTemplate(tokenizer_for(name))
    messages = data.draw(conversations(FORMATS[name].system))
    _, together = find_message_spans(chat, Conversation(messages), assistants(messages))
    for number in assistants(messages):
        assert find_message_spans(chat, Conversation(messages), [number])[1] == {
            number: together[number]
        }


# --- which turns ----------------------------------------------------------------------------------

THREE = [m for n in "123" for m in (turn("user", f"ask {n}"), turn("assistant", f"say {n}"))]


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_last_turn_is_trained_with_last_assistant(name):
    chat = ChatTemplate(tokenizer_for(name))
    [every], [last] = trained(chat, [THREE]), trained(chat, [THREE], "last_assistant")
    assert len(every) == 3
    assert last == every[-1:]


@pytest.mark.parametrize("name", FORMATS)
def test_everything_is_trained_with_all(name):
    chat = ChatTemplate(tokenizer_for(name))
    [row] = prepared(chat, [THREE], "all")
    assert (row["labels"] == row["input_ids"]).all()
    assert chat.tokenizer.decode(row["input_ids"]) == chat.render(Conversation(THREE))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flags", [(False, None, True), (True, False, False), (None, False, None)])
def test_a_message_says_itself_whether_it_is_trained(name, flags):
    chat = ChatTemplate(tokenizer_for(name))
    flagged = [{**m, "train": flags[n // 2]} if n % 2 else m for n, m in enumerate(THREE)]
    [every], [some] = trained(chat, [THREE]), trained(chat, [flagged])
    wanted = [text for text, flag in zip(every, flags, strict=True) if flag is not False]
    assert "".join(some) == "".join(wanted)


def test_a_user_message_is_trained_if_it_says_so():
    chat = ChatTemplate(tokenizer_for("chatml"))
    flagged = [{**THREE[0], "train": True}, *THREE[1:]]
    [runs] = trained(chat, [flagged], "last_assistant")
    assert runs == ["ask 1<|im_end|>", "say 3<|im_end|>"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_of_a_turn_have_the_weight_of_its_message(name):
    chat = ChatTemplate(tokenizer_for(name))
    weights = (0.5, 0.0, 2.0)
    weighted = [{**m, "weight": weights[n // 2]} if n % 2 else m for n, m in enumerate(THREE)]
    [row] = prepared(chat, [weighted])
    [every] = trained(chat, [THREE])
    for weight, text in zip((0.5, 2.0), (every[0], every[2]), strict=True):
        assert chat.tokenizer.decode(row["input_ids"][row["loss_weights"] == weight]) == text
    assert ((row["labels"] != -100) == (row["loss_weights"] > 0)).all()
    assert set(row["loss_weights"].tolist()) == {0.0, 0.5, 2.0}


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5", "qwen2_5", "phi3", "deepseekv3"])
def test_of_two_assistant_messages_in_a_row_each_has_its_own_words(name):
    chat = ChatTemplate(tokenizer_for(name))
    messages = [turn("user", "a"), turn("assistant", "one"), turn("assistant", "two")]
    text, spans = find_message_spans(chat, Conversation(messages), [1, 2])
    first, second = (text[start:stop] for [(start, stop)] in spans.values())
    assert "one" in first
    assert "two" not in first
    assert second.startswith("two")


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_8", "gemma4", "llama3"])
def test_the_assistant_may_speak_first(name):
    chat = ChatTemplate(tokenizer_for(name))
    messages = [turn("system", "x"), turn("assistant", "Welcome"), *SENTENCES]
    text, spans = find_message_spans(chat, Conversation(messages), [1, 3])
    [(start, stop)] = spans[1]
    assert "Welcome<" in text[start:stop]
    assert text[start:stop].count("<|im_start|>") == 0


# --- {% generation %} -----------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOLS = [
    turn("user", "How warm?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "minus nine"},
    turn("assistant", "It is cold."),
    *SENTENCES,
]
MARKED = [
    path.stem
    for path in sorted(SHIPPED.glob("*.jinja"))
    if "{% generation" in path.read_text().replace("{%-", "{%")
    and path.stem not in ("idefics3_training", "llava_next_training", "smolvlm_training")
]


def test_templates_that_mark_generations_are_many():
    assert len(MARKED) > 20


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_marked_turns_are_those_of_trl_token_by_token(name, data):
    tokenizer = tokenizer_for(name)
    messages = data.draw(conversations(not name.startswith("gemma_")))
    assert_marked_as_by_trl(tokenizer, messages)


def test_a_last_character_of_several_tokens_is_trained_whole():
    """Its first token may begin with the character before, which TRL's mask takes alone."""
    tokenizer = tokenizer_for("diffusion_gemma_training")
    assert_marked_as_by_trl(
        tokenizer, [{"role": "user", "content": ""}, {"role": "assistant", "content": "aÀ"}]
    )


def assert_marked_as_by_trl(tokenizer, messages):
    [row] = prepared(ChatTemplate(tokenizer), [messages])
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    expected, chars = theirs["assistant_masks"], theirs.encodings[0].offsets
    # Of a last character of several tokens they take only the first, which may begin before it.
    for n, ((_, end), (start, last)) in enumerate(pairwise(chars), 1):
        expected[n] |= expected[n - 1] and start < last == end
    assert row["input_ids"].tolist() == theirs["input_ids"]
    assert (row["labels"] != -100).tolist() == expected


@pytest.mark.parametrize("name", MARKED)
def test_marked_turns_are_told_apart(name):
    chat = ChatTemplate(tokenizer_for(name))
    [every] = trained(chat, [THREE])
    [last] = trained(chat, [THREE], "last_assistant")
    assert "".join(every).endswith("".join(last))
    assert [f"say {n}" in "".join(last) for n in "123"] == [False, False, True]
    for number in (1, 3, 5):
        weighted = [{**m, "weight": 2.0} if n == number else m for n, m in enumerate(THREE)]
        [row] = prepared(chat, [weighted])
        heavy = chat.tokenizer.decode(row["input_ids"][row["loss_weights"] == 2.0])
        assert [f"say {n}" in heavy for n in (1, 2, 3)] == [n == number for n in (1, 3, 5)]
        assert "".join(every) == chat.tokenizer.decode(row["input_ids"][row["labels"] != -100])


# --- tools ----------------------------------------------------------------------------------------

RENDERS_CALLS = [
    *("qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "lfm2_v2", "lfm2_2_5"),
    *("nemotron_3_nano", "gemma4", "gemma4_v5", "muse_glimmer", "qwen2_5_training"),
]


@pytest.mark.parametrize("name", RENDERS_CALLS)
def test_calls_are_trained_and_what_tools_answer_is_not(name):
    [runs] = trained(ChatTemplate(tokenizer_for(name)), [TOOLS])
    assert len(runs) == 3
    assert "weather" in runs[0]
    assert "Bern" in runs[0]
    assert "It is cold." in runs[1]
    assert "Hello" in runs[2]
    assert not any("minus" in run or "nine" in run or "How" in run for run in runs)


@pytest.mark.parametrize("name", RENDERS_CALLS)
@pytest.mark.parametrize("wanted", [1, 3, 5])
def test_a_call_and_the_answer_after_it_are_told_apart(name, wanted):
    chat = ChatTemplate(tokenizer_for(name))
    [every] = trained(chat, [TOOLS])
    flagged = [{**m, "train": n == wanted} for n, m in enumerate(TOOLS)]
    assert trained(chat, [flagged]) == [[every[wanted // 2]]]


def refusal(name: str, messages, train_on: str = "assistant") -> str:
    with pytest.raises(ValueError) as error:
        trained(ChatTemplate(tokenizer_for(name)), [SENTENCES, messages], train_on)
    return str(error.value)


@pytest.mark.parametrize("name", ["llama3", "phi3", "lfm2", "qwen2_5_vl"])
def test_a_template_that_drops_tool_calls_is_refused(name):
    assert re.match(
        r"row 1 of the train dataset: the chat template leaves out the tool call of message 1 "
        r"\('weather'\), .* Use a template that keeps it or has {% generation %}",
        refusal(name, TOOLS),
    )


def test_a_template_that_renders_one_of_two_like_calls_is_refused():
    twice = [TOOLS[0], {**TOOLS[1], "tool_calls": [CALL, CALL]}]  # "We assume max 1 tool call"
    assert "leaves out the tool call of message 1" in refusal("gptoss", twice)


def test_a_template_that_drops_contents_is_refused():
    mute = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content if m.role == 'user' }}\n"
    tokenizer = with_template(mute + "<|im_end|>{% endfor %}")
    with pytest.raises(ValueError, match=r"row 0 of .*leaves out the content of message 1 \('Hel"):
        trained(ChatTemplate(tokenizer), [SENTENCES])


# --- reasoning ------------------------------------------------------------------------------------

THINKING = ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "gptoss", "muse_glimmer"]


def reasoned(content: str, reasoning: str, key: str) -> dict[str, str]:
    return {**turn("assistant", content), key: reasoning}


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
    assert complaint.startswith("row 1 of the train dataset: the chat template leaves out the reas")
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


def test_the_same_reasoning_under_two_keys_is_asked_for_once():
    message = {**reasoned("It is 4.", "two twos", "reasoning"), "reasoning_content": "two twos"}
    [runs] = trained(ChatTemplate(tokenizer_for("qwen3")), [[turn("user", "2 + 2"), message]])
    assert runs == ["<think>\ntwo twos\n</think>\n\nIt is 4.<|im_end|>"]


# --- the checks can fail --------------------------------------------------------------------------


def growing_prefixes(chat, conversation, wanted, **options):
    """Spans as many take them: what each message adds to the text of those before it."""

    def first(number, **prompt):
        return chat.render(conversation.with_messages(conversation.messages[:number]), **prompt)

    spans = {n: [(len(first(n, generation_prompt=True)), len(first(n + 1)))] for n in wanted}
    return chat.render(conversation), spans


def shifted(chat, conversation, wanted, **options):
    text, found = find_message_spans(chat, conversation, wanted, **options)
    return text, {n: [(a + 1, b + 1) for a, b in spans] for n, spans in found.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_spans_one_character_off_are_noticed(name, monkeypatch):
    chat = ChatTemplate(tokenizer_for(name))
    assert_turns(name, chat, [THREE])
    monkeypatch.setattr(row_format, "find_message_spans", shifted)
    with pytest.raises(AssertionError):
        assert_turns(name, chat, [THREE])


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "phi3", "qwen3_5_think", "chatml"])
def test_growing_prefixes_are_noticed(name, monkeypatch):
    monkeypatch.setattr(row_format, "find_message_spans", growing_prefixes)
    with pytest.raises(AssertionError):
        assert_turns(name, ChatTemplate(tokenizer_for(name)), [THREE])


# --- rendered by the compiled template ------------------------------------------------------------

SHORT_CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "<b>Yes & no</b>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."},
        {"role": "user", "content": "{{ messages }} {% raw %}"},
    ],
]


@pytest.mark.parametrize("template", sorted(p.stem for p in SHIPPED.glob("*.jinja")))
@pytest.mark.parametrize("messages", SHORT_CHATS)
@pytest.mark.parametrize("prompt", [False, True])
def test_plain_texts_render_as_apply_chat_template_does(template, messages, prompt):
    chat = sentence_tokenizer()
    chat.chat_template = (SHIPPED / f"{template}.jinja").read_text()
    ours = ChatTemplate(chat)
    try:
        expected = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except TEMPLATE_ERRORS as error:
        with pytest.raises(type(error)):
            ours.render(Conversation(messages), generation_prompt=prompt)
    else:
        assert ours._renders_directly
        assert ours.render(Conversation(messages), generation_prompt=prompt) == expected


def test_a_tokenizer_that_renders_otherwise_is_asked_itself():
    chat = sentence_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    apply = chat.apply_chat_template
    chat.apply_chat_template = lambda *args, **kwargs: apply(*args, **kwargs).upper()
    ours = ChatTemplate(chat)
    assert not ours._renders_directly
    assert ours.render(Conversation([{"role": "user", "content": "hi"}])) == "HI|"
