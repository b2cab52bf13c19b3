"""The preview commands print exactly the documents and the plan that the trainer uses."""

import json
import re

import pytest
from datasets import Dataset
from harness import QUIET
from helpers.attacks import ATTACKS, harmful
from helpers.chat_templates import tokenizer_for
from helpers.command import run_command
from helpers.runs import flags_of, preview_epoch, preview_losses, preview_rows, run_of_settings
from helpers.tiny import save_tiny_model, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer, show_document


def inspect(dataset, tokenizer, settings=(), *, rows=None, prepares_all=False, model=None):
    """Yield the texts that the command `inspect` prints."""
    run = run_of_settings(dataset, tokenizer, settings, model)
    for preview in preview_rows(run, rows):
        yield from preview.texts
    if prepares_all:
        yield preview_losses(run)


def plan(dataset, tokenizer, settings, model=None):
    return preview_epoch(run_of_settings(dataset, tokenizer, settings, model))


def test_rows_are_shown_piece_by_piece_or_with_the_reason_why_not():
    rows = Dataset.from_list([{"text": "one two three four"}, {"text": "long " * 50}])
    settings = ["--max_length", "8", "--overflow", "split"]
    shown = list(inspect(rows, tiny_tokenizer(), settings, rows=[0]))
    assert shown[1].startswith(f"row 0, piece 2 of {len(shown) - 1} ")
    assert re.match("row 0 · longer than max_length=8: split into ", shown[-1])
    (shown,) = inspect(rows, tiny_tokenizer(), ["--response_template", "###"], rows=[0])
    assert re.match("row 0 · not trained: .*response_template '###'", shown)
    settings = ["--max_length", "32", "--overflow", "drop"]
    *_, lost = inspect(rows, tiny_tokenizer(), settings, rows=[0], prepares_all=True)
    assert "1 document longer than max_length=32: dropped" in lost


def test_a_row_says_what_preparation_has_changed():
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    plain, called = chat_row("So."), chat_row("", tool_calls=[call])
    thought = chat_row("So.", reasoning_content="Hm.")
    rows = Dataset.from_list([plain, called, plain, thought])
    settings = ["--train_on", "all"]
    run = run_of_settings(rows, tokenizer_for("qwen2_5"), settings)
    notes = [preview.to_dict()["notes"] for preview in preview_rows(run, range(4))]
    assert notes[0] == notes[2] == []
    assert [each.split(":")[0] for each in notes[1] + notes[3]] == [
        "with arguments of tool calls as JSON text",
        "with reasoning that the chat template leaves out",
    ]


@pytest.mark.parametrize("train_on", ["assistant", "every_turn"])
def test_a_reason_names_the_row_of_the_data_set(train_on):
    """Only two rows are prepared, of which the second may be several documents."""
    short, long = chat_row("So."), chat_row("So " * 90)
    rows = Dataset.from_list([short, short, {"messages": short["messages"] + long["messages"]}])
    settings = ["--train_on", train_on, "--overflow", "error", "--max_length", "60"]
    *_, shown = inspect(rows, tiny_tokenizer(chat=True), settings, rows=[0, 1, 2])
    assert re.match(r"row 2 · not trained: document 2 of the inspected dataset has \d+ ", shown)
    padded = Dataset.from_list([{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}] * 5)
    masks = [[1, 1, 1]] * 4 + [[1, 1, 0]]
    padded = padded.remove_columns("attention_mask").add_column("attention_mask", masks)
    _, shown = inspect(padded, tiny_tokenizer(), rows=[0, 4])
    assert "not trained: document 4 of the inspected dataset has other masks" in shown


# --- every setting that the trainer honors --------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}<|other|>{% endif %}{% endfor %}"
)


def chat_row(answer: str, **keys) -> dict:
    question = {"role": "user", "content": "Why?"}
    return {"messages": [question, {"role": "assistant", "content": answer, **keys}]}


def trainer_of(folder, model, rows, options: dict) -> PackedSFTTrainer:
    args = PackedSFTConfig(str(folder / "out"), **QUIET | options)
    return PackedSFTTrainer(str(model), args, train_dataset=rows)


def tokenizer_of(model):
    return AutoTokenizer.from_pretrained(model)


def trained_documents(trainer) -> list[str]:
    return [
        show_document(document, trainer.processing_class, name=f"row {row}")
        for row, document in enumerate(trainer.train_dataset)
    ]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model and its tokenizer in a folder; generation also stops at <|other|>."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)
    config = tiny_model("llama").generation_config
    config.eos_token_id = [tiny_tokenizer().convert_tokens_to_ids("<|other|>")]
    config.save_pretrained(folder)
    return folder


def template_folder(folder) -> str:
    """Save a tokenizer with another template and an additional token, to be cloned."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.eos_token = "<|turn|>"
    tokenizer.chat_template = TEMPLATE.replace("<|other|>", "<|turn|>")
    tokenizer.save_pretrained(folder)
    return str(folder)


HONORED = ["template file", "template of a tokenizer", "eos", "append_eos", "skip"]


@pytest.mark.parametrize("name", HONORED)
def test_the_preview_honors_what_the_trainer_honors(tmp_path, chat_model, name):
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    texts = Dataset.from_list([{"text": "So."}, {"text": "Not so."}])
    chats = Dataset.from_list([chat_row("So."), chat_row("Not so.")])
    tokens = tiny_tokenizer()("So.<|other|>")["input_ids"]
    cloned = {"chat_template_path": template_folder(tmp_path / "cloned"), "train_on": "assistant"}
    skips = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 3, "packing": False}
    rows, options = {
        "template file": (chats, {"chat_template_path": str(file)}),
        "template of a tokenizer": (chats, cloned),
        "eos": (texts, {"eos_token": "<|other|>"}),
        # The document ends where generation stops, so nothing is appended.
        "append_eos": (Dataset.from_list([{"input_ids": tokens}] * 2), {"append_eos": True}),
        "skip": (Dataset.from_list([{"input_ids": tokens, "labels": tokens}] * 2), skips),
    }[name]
    trainer = trainer_of(tmp_path, chat_model, rows, options)
    tokenizer, flags = tokenizer_of(chat_model), flags_of(options)
    found = list(inspect(rows, tokenizer, flags, rows=[0, 1], model=str(chat_model)))
    assert found == trained_documents(trainer)
    if name in ("template file", "template of a tokenizer", "eos"):  # the setting does something
        plain = ["--train_on", "assistant"] if "train_on" in options else []
        assert found != list(inspect(rows, tokenizer, plain, rows=[0, 1]))


def test_the_plan_honors_what_the_trainer_honors(tmp_path, chat_model):
    rows = Dataset.from_list([chat_row("word " * n) for n in range(1, 30)])
    for options in (
        {"static_shapes": True, "pad_to_multiple_of": 48, "max_length": 256},
        {"eos_token": "<|other|>", "max_length": 256, "train_on": "assistant"},
        {"max_length": 64, "per_device_train_batch_size": 2},
    ):
        report = trainer_of(tmp_path, chat_model, rows, options).packing_report
        trained = json.loads(report.to_json())
        planned = plan(rows, tokenizer_of(chat_model), flags_of(options), str(chat_model))
        of_the_model = {"attention": None, "checked": None}
        found = json.loads(planned.to_json())
        assert found | of_the_model == trained | of_the_model
        assert {"utilization": report.utilization, "bins": report.bins}.items() <= found.items()
        assert found["checked"]["verdict"] == trained["checked"]["verdict"] == "not checked"


def test_the_first_row_decides_as_in_training(tmp_path, chat_model):
    """The first row decides whether flags of messages count, and the form of all rows."""
    rows = Dataset.from_list([chat_row("So.", train=True), chat_row("Not so.", train=None)])
    found = list(inspect(rows, tokenizer_of(chat_model), rows=[0, 1]))
    assert found == trained_documents(trainer_of(tmp_path, chat_model, rows, {}))
    other = {"text": None, "prompt": "Why?", "completion": "So."}
    mixed = Dataset.from_list([{"text": "So.", "prompt": None, "completion": None}, other])
    _, second = inspect(mixed, tiny_tokenizer(), rows=[0, 1])
    assert "row 1 · not trained: " in second


REFUSED = [
    (["--chat_template_path", "nowhere.jinja"], "nowhere.jinja"),
    (["--assistant_only_loss", "true"], "assistant_only_loss=True needs conversations"),
    (["--nonsense", "1"], "--nonsense"),
    (["--dataset_kwargs", '{"skip_prepare_dataset": true}'], "have no input_ids"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_a_setting_that_cannot_be_is_refused_in_the_preview_too(settings, sentence):
    rows = Dataset.from_list([{"text": "So."}])
    for preview in (
        lambda: list(inspect(rows, tiny_tokenizer(), settings, prepares_all=True)),
        lambda: plan(rows, tiny_tokenizer(), settings),
    ):
        with pytest.raises((ValueError, OSError), match=re.escape(sentence)):
            preview()


# --- the command ----------------------------------------------------------------------------------


def test_the_status_and_a_sentence_say_that_a_row_is_not_trained(tmp_path, capsys):
    """And nothing of the data acts on the terminal."""
    text = "".join(ATTACKS[name] for name in sorted(ATTACKS.keys() - {"lone surrogate"}))
    rows = [chat_row(f"So {text}."), chat_row("So.")]
    rows[1]["messages"][0]["role"] = f"wizard{text}"
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    Dataset.from_list(rows).to_json(tmp_path / "data.jsonl")
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    for options, status in ((["--rows", "0"], 0), (["--rows", "0", "1"], 1), (["--all"], 2)):
        assert run_command(["inspect", *words, "--train_on", "assistant", *options]) == status
        out, err = capsys.readouterr()
        assert not harmful(out + err)
        assert out.count("⟧") == out.count("⟦") == 1
        if status == 1:
            assert "row 1 · not trained: message 0 of 'messages' has the role 'wizard" in out
