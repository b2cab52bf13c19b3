"""Documents end in a trained stop token, or are counted, or get one; two BOS tokens are counted."""

from itertools import groupby

import pytest
from datasets import Dataset, concatenate_datasets
from harness import make_trainer
from helpers.chat_templates import SHIPPED, prepared, source_of, turn, with_template
from helpers.tiny import CHATML, tiny_rows, tiny_tokenizer
from transformers import GenerationConfig

from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.stop_tokens import (
    EosRule,
    append_eos,
    generation_stop_ids,
    note_going_on,
    note_missing_eos,
    stop_token_ids,
)
from trl_packing.data.stream import fit_stream
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import TOKEN_COLUMNS

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
A, NEWLINE, SPACE = (TOKENIZER.encode(text)[0] for text in ("A", "\n", " "))
STOPS = frozenset({EOS, END})
RULE = EosRule(TOKENIZER, STOPS, appends=True)


def document(ids: list[int], trained: str) -> dict:
    """`trained` has an x for every trained token and a . for every other one."""
    marks = zip(ids, trained, strict=True)
    return {"input_ids": ids, "labels": [token if mark == "x" else -100 for token, mark in marks]}


def documents(*pairs) -> Dataset:
    return Dataset.from_list([document(*pair) for pair in pairs])


def arrow(dataset) -> ArrowDocuments:
    return ArrowDocuments(dataset, TOKEN_COLUMNS)


ENDS = [
    (CHATML, ["<|im_end|>"]),
    (CHATML.replace("'<|im_end|>'", "' <|other|><|im_end|>'"), ["<|other|>"]),
    ("{{ raise_exception('no') }}", []),
    ("{{ messages[0]['content'] }}<|im_end|>", []),  # not the answer's end
]


@pytest.mark.parametrize(("template", "names"), ENDS)
def test_the_end_of_a_turn_is_read_from_the_template(template, names):
    tokenizer = tiny_tokenizer()
    expected = {EOS, *map(tokenizer.convert_tokens_to_ids, names)}
    assert stop_token_ids(tokenizer, chat_template=template) == expected
    tokenizer.chat_template = template
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[7, 8])) == {*expected, 7, 8}


# --- the check ------------------------------------------------------------------------------------

ENDED = [
    ([A, EOS], "xx"),
    ([A, END, NEWLINE, SPACE, NEWLINE], "xxxxx"),
    ([A, END, A, A, END, NEWLINE], ".x...."),  # the user has the last word
]
UNENDED = [
    ([A, A, END], ".x."),  # not trained
    ([A, END, A], "xxx"),
    ([A, A, END, NEWLINE], ".x.."),
    ([NEWLINE, NEWLINE], "xx"),
]
LEFT_OUT = [([A, EOS], ".."), ([], "")]


def test_documents_are_counted_one_by_one_through_mappings_and_chunks():
    parts = [documents(*ENDED), documents(*UNENDED, *LEFT_OUT), documents(*ENDED, UNENDED[0])]
    mixed = concatenate_datasets(parts).shuffle(seed=2).select(range(12))
    wrong = [document(*pair) for pair in UNENDED]
    unended = [row in wrong for row in mixed]
    of = sum(any(label != -100 for label in row["labels"]) for row in mixed)
    note = note_missing_eos(arrow(mixed), RULE)
    assert note.startswith(f"{sum(unended)} of {of} documents")
    assert note.endswith(f"(the first is document {unended.index(True)})")
    for pair in (*ENDED, *LEFT_OUT):
        assert note_missing_eos(arrow(documents(pair)), RULE) is None
    assert note_missing_eos(arrow(documents(*UNENDED)), EosRule(TOKENIZER, frozenset())) is None


# --- the ends of all answers ----------------------------------------------------------------------

# Tokens at which models of a family stop: the EOS of their tokenizers first, then those of their
# generation configs.
FAMILIES = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>"],
    "gemma": ["<end_of_turn>"],
    "gemma4": ["<turn|>"],
    "glm4moe": ["</s>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "llava_next": ["</s>"],
    "muse": ["<|eot|>"],
    "nemotron": ["<|im_end|>"],
    "phi3": ["</s>", "<|end|>"],
    "qwen": ["<|im_end|>"],
    "smolvlm": ["<end_of_utterance>"],
}
SAID = {"gptoss": note_going_on, "gptoss_training": note_going_on, "glm4moe": note_missing_eos}
SEVERAL = [m for n in "123" for m in (turn("user", f"ask {n}"), turn("assistant", f"say {n}"))]


def ends_of(documents: Dataset, spaces: list[int]) -> list[int]:
    """The last token, no white space, of each trained part."""
    found = []
    for labels in documents["labels"]:
        for is_trained, part in groupby(labels, lambda label: label != -100):
            found += [token for token in part if is_trained and token not in spaces][-1:]
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.jinja")))
def test_every_answer_ends_where_generation_stops_or_it_is_said(name):
    family = max((each for each in FAMILIES if name.startswith(each)), key=len)
    tokenizer = with_template(source_of(name), more=FAMILIES[family])
    tokenizer.eos_token = FAMILIES[family][0]
    config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(FAMILIES[family]))
    known = generation_stop_ids(tokenizer, config)
    rule = EosRule(tokenizer, stop_token_ids(tokenizer, config), False, known)
    messages = SEVERAL
    if family in ("idefics3", "smolvlm", "llava_next"):
        parts = [[{"type": "text", "text": m["content"]}] for m in SEVERAL]
        messages = [{**m, "content": part} for m, part in zip(SEVERAL, parts, strict=True)]
    for train_on in ("assistant", "last_assistant", "every_turn"):
        if train_on == "every_turn" and family == "deepseek":
            continue  # its prompts open thoughts, and these answers have none
        rows = Dataset.from_list(prepared(ChatTemplate(tokenizer), [messages], train_on))
        wrong = [token for token in ends_of(rows, rule.spaces) if token not in known]
        notes = {note for note in (note_going_on, note_missing_eos) if note(arrow(rows), rule)}
        said = {SAID[name]} if name in SAID and train_on != "every_turn" else set()
        if family == "gptoss" and train_on == "last_assistant":
            said = set()
        assert notes == said
        assert bool(wrong) == bool(said)


def test_answers_that_a_template_ends_in_another_token_are_said(tmp_path, caplog):
    rows = [{"messages": SEVERAL}] * 3
    for settings, said in (({}, True), ({"eos_token": "<|im_end|>"}, False)):
        caplog.clear()
        tokenizer = tiny_tokenizer(chat=True)
        tokenizer.eos_token = "<eos>"
        trainer = make_trainer(
            tmp_path, rows, tokenizer=tokenizer, train_on="assistant", **settings
        )
        note = (
            "where generation goes on ('<|im_end|>' in document 0, the first; it stops at '<eos>'"
        )
        assert (note in caplog.text) == said
        assert ("set eos_token='<|im_end|>'" in caplog.text) == said
        assert ("generation goes on" in str(trainer.packing_report)) == said


# --- appending ------------------------------------------------------------------------------------

# The input, and the expected output.
APPENDED = [
    (([A, A], ".x"), ([A, A, EOS], ".xx")),
    (([A, A, NEWLINE], ".xx"), ([A, A, NEWLINE, EOS], ".xxx")),
    (([A, END, A], "xxx"), ([A, END, A, EOS], "xxxx")),
    # The stop token is there: it is trained, none is appended.
    (([A, A, END, NEWLINE], ".x.."), ([A, A, END, NEWLINE], ".xx.")),
]
LEFT_ALONE = [
    *ENDED,
    *LEFT_OUT,
    ([A, A, A], ".x."),  # the end is not trained, and no stop token
    ([A, A, A, END], ".x.."),  # the stop token belongs to an untrained turn
    ([END], "."),  # nothing is trained before it
]
ALL_IN = [document(*pair) for pair in (*(before for before, _ in APPENDED), *LEFT_ALONE)]
ALL_OUT = [document(*pair) for pair in (*(after for _, after in APPENDED), *LEFT_ALONE)]


def appended(rows) -> Dataset:
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return append_eos(arrow(dataset), RULE).dataset


def test_a_document_that_is_trained_to_its_end_gets_a_stop_token():
    assert list(appended(ALL_IN)) == ALL_OUT
    assert list(appended(ALL_OUT)) == ALL_OUT, "a second time changes nothing"
    joined = concatenate_datasets([Dataset.from_list(ALL_IN[:3]), Dataset.from_list(ALL_IN[3:])])
    order = [3, 8, 0, 5, 9, 1]
    assert list(appended(joined.select(order))) == [ALL_OUT[i] for i in order]
    assert note_missing_eos(arrow(appended(ALL_IN)), RULE).startswith("2 of"), "untrained tails"
    stream = Dataset.from_list(ALL_IN).to_iterable_dataset()
    cut = Overflow("truncate", 4)
    fitted, _ = fit_and_count(appended(ALL_IN), cut)
    assert list(fit_stream(stream, cut, RULE)) == list(fitted)
    assert list(fit_stream(stream, cut)) != list(fitted), "the control"


def test_what_is_trained_now_has_the_weight_1():
    rows = [{**row, "loss_weights": [0.5] * len(row["labels"])} for row in ALL_IN]
    for before, after in zip(rows, appended(rows), strict=True):
        was = [*before["labels"], None]
        trained_now = [new != old for new, old in zip(after["labels"], was, strict=False)]
        assert after["loss_weights"] == [1.0 if now else 0.5 for now in trained_now]


# --- in the trainer -------------------------------------------------------------------------------


def test_the_trainer_counts_and_appends(tmp_path, caplog):
    rows = [{"input_ids": [A, 7, 8, EOS]}] * 3 + [{"input_ids": [A, 7, 8]}]
    trainer = make_trainer(tmp_path, rows)
    note = "1 of 4 documents (25.0%) do not end in a trained stop token ('<eos>')"
    assert note in str(trainer.packing_report)
    assert f"train dataset: {note}" in caplog.text
    assert trainer.train_dataset["input_ids"][3] == [A, 7, 8]
    caplog.clear()
    trainer = make_trainer(tmp_path, rows, append_eos=True)
    assert "stop token" not in caplog.text + str(trainer.packing_report)
    for column in ("input_ids", "labels"):
        assert trainer.train_dataset[column][3] == [A, 7, 8, EOS]


def test_what_can_get_no_stop_token_is_refused(tmp_path):
    nameless = tiny_tokenizer()
    rows = [document([A, A], "xx")]
    nameless.eos_token = None
    assert stop_token_ids(nameless) == frozenset()
    options = {"tokenizer": nameless, "append_eos": True, "max_steps": 1}
    for data in (rows, Dataset.from_list(rows).to_iterable_dataset()):
        with pytest.raises(ValueError, match="append_eos=True, but the tokenizer has no eos_token"):
            make_trainer(tmp_path, data, **options).train()
    with pytest.raises(ValueError, match="the train dataset is packed already"):
        make_trainer(tmp_path, tiny_rows("packed"), append_eos=True)


# --- two BOS tokens -------------------------------------------------------------------------------


def test_a_run_on_rendered_text_says_so(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.add_bos_token = "<|im_start|>", True
    for text, said in (("<|im_start|>user A", True), ("user A", False)):
        report = make_trainer(tmp_path, [{"text": text}] * 2, tokenizer=tokenizer).packing_report
        assert ("2 of 2 documents begin with two BOS" in str(report.preparation)) == said
