"""The page of packed rows shows the batches of the trainer, and any text without harm."""

import json
import re

import numpy as np
import pytest
from datasets import Dataset
from helpers.attacks import ATTACKS, harmful
from helpers.browser import HOSTILE, open_page
from helpers.tiny import save_tiny_model, tiny_model, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.cli import main
from trl_packing.tools.preview.previewed_run import PreviewedRun, trace_documents
from trl_packing.tools.preview.show import token_texts
from trl_packing.tools.rows.packed_rows import (
    CUT,
    NO_STOP_TOKEN,
    NOTHING_TRAINED,
    WEIGHTED,
    PackedEpoch,
)
from trl_packing.tools.rows.page import MAX_TOKENS, rows_page
from trl_packing.tools.training_command import TrainerCall

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def chats(number: int = 24) -> Dataset:
    """Conversations of one to three turns, of different lengths."""
    rows = []
    for i in range(number):
        turns = []
        for turn in range(1 + i % 3):
            turns += [
                {"role": "user", "content": " ".join(WORDS[: 1 + (i + turn) % 7])},
                {"role": "assistant", "content": " ".join(WORDS[-1 - (i * 5 + turn) % 9 :])},
            ]
        rows.append({"messages": turns})
    return Dataset.from_list(rows)


def answers(number: int = 24) -> Dataset:
    """Four answers to each question, which is longer than the shortest prefix that is shared."""
    questions = [" ".join((WORDS * 3)[i : i + 18]) for i in range(number // 4)]
    ends = [" ".join(WORDS[-1 - i * 5 % 9 :]) for i in range(number)]
    return Dataset.from_list(
        [{"prompt": questions[i // 4], "completion": f" {i} {end}"} for i, end in enumerate(ends)]
    )


def tokenized(number: int = 20, **columns) -> Dataset:
    lengths = [3 + i * 7 % 19 for i in range(number)]
    ids = [[10 + (i + k) % 250 for k in range(length)] for i, length in enumerate(lengths)]
    labels = [[-100 if k < 2 else token for k, token in enumerate(row)] for row in ids]
    rows = {"input_ids": ids, "labels": labels}
    return Dataset.from_dict(rows | {name: make(lengths) for name, make in columns.items()})


def weights(lengths):
    return [[0.1 * (k % 4) for k in range(n)] for n in lengths]


def packed_before() -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18]],
            "labels": [[7, 8, -100, 10, 11], [12, 13, 14], [15, -100, -100, 18]],
            "seq_lengths": [[2, 3], [3], [3, 1]],
        }
    )


def data_of(html: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def page_of(run, **options) -> str:
    return rows_page(PackedEpoch.of(run), **options)


def joined(rows: list[dict], name: str) -> list[list]:
    """Return the values of each micro-batch, from its rows."""
    found: dict[int, list] = {}
    for row in rows:
        found.setdefault(row["microBatch"], []).extend(row[name])
    return [found[number] for number in sorted(found)]


# --- the batches of the trainer -------------------------------------------------------------------

SETTINGS = {
    "bins": (chats, ["--train_on", "assistant", "--max_length", "64"]),
    "several bins": (
        chats,
        ["--train_on", "last_assistant", "--max_length", "64"],
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    ),
    "cut": (chats, ["--max_length", "24"]),
    "split": (chats, ["--max_length", "24", "--overflow", "split"]),
    "wrapped": (chats, ["--max_length", "32", "--packing_strategy", "wrapped"]),
    "shuffled": (chats, ["--max_length", "64", "--shuffle_dataset", "true", "--seed", "5"]),
    "without packing": (
        chats,
        ["--packing", "false", "--max_length", "40", "--shuffle_dataset", "true"],
        {"per_device_train_batch_size": 4},
    ),
    "documents per step": (
        chats,
        ["--documents_per_step", "6", "--max_length", "64"],
        {"gradient_accumulation_steps": 2},
    ),
    "weights": (lambda: tokenized(loss_weights=weights), ["--max_length", "32"]),
    "document weights": (
        lambda: tokenized(loss_weight=lambda n: [0.5 + i for i in range(len(n))]),
        ["--max_length", "32", "--loss_weighting", "sqrt"],
    ),
    "padding": (chats, ["--max_length", "64", "--pad_to_multiple_of", "16"]),
    "static shapes": (
        chats,
        ["--max_length", "64", "--static_shapes", "true"],
        {"per_device_train_batch_size": 2},
    ),
    "shared prefixes": (
        answers,
        ["--max_length", "128", "--prefix_sharing", "bin", "--pad_to_multiple_of", "8"],
        {"per_device_train_batch_size": 2},
    ),
    "shared prefixes with weights": (
        lambda: answers().add_column("loss_weight", [0.5 + i for i in range(24)]),
        ["--prefix_sharing", "bin", "--packing", "false", "--max_length", "64"],
        {"per_device_train_batch_size": 8},
    ),
    "packed before": (packed_before, ["--max_length", "8"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_page_holds_the_batches_of_the_data_loader(name, tmp_path):
    make, options, *rest = SETTINGS[name]
    rest = {"per_device_train_batch_size": 1} | dict(*rest)
    options = [
        *options,
        *(text for key, value in rest.items() for text in (f"--{key}", str(value))),
    ]
    path = save_tiny_model(tmp_path / "model", "llama", chat=True)
    tokenizer = tiny_tokenizer(chat=True)
    run = PreviewedRun.from_settings(make(), tokenizer, options, str(path))
    args = run.args
    args.output_dir = str(tmp_path)
    trainer = PackedSFTTrainer(
        str(path), args, train_dataset=make(), processing_class=tiny_tokenizer(chat=True)
    )
    trainer._collators.packed.shares_prefixes = "shared" in name  # after the check of a model
    loader = trainer.get_train_dataloader()
    epoch = PackedEpoch.of(run)
    for number in (0, 1):
        loader.batch_sampler.set_epoch(number)
        epoch.sampler.set_epoch(number)
        batches = list(loader)
        data = data_of(rows_page(epoch, max_rows=1000))
        names = {"ids": "input_ids", "labels": "labels", "positions": "position_ids"}
        for shown, of_batch in names.items():
            expected = [batch[of_batch][0].tolist() for batch in batches]
            assert joined(data["rows"], shown) == expected
        for place, batch in enumerate(batches):
            parts = [row["weights"] for row in data["rows"] if row["microBatch"] == place]
            if "loss_weights" in batch:
                found = np.float32([weight for part in parts for weight in part])
                assert np.array_equal(found, batch["loss_weights"][0].numpy())
            else:
                assert parts == [None] * len(parts)
        parts = [row.get("segments", row["documents"]) for row in data["rows"]]
        starts = [{part["start"] for part in of_row} for of_row in parts]
        expected = [set(batch["cu_seq_lens_q"][:-1].tolist()) for batch in batches]
        assert set().union(*starts) <= set().union(*expected)
    assert any("segments" in row for row in data["rows"]) == ("shared" in name)
    assert ("loss_weights" in batches[0]) == ("weights" in name or "key_index" in batches[0])


def test_a_page_of_shared_prefixes_says_who_holds_and_who_trains_a_token():
    run = shared_run()
    data, tokenizer = data_of(page_of(run, max_rows=99)), run.preparation.eos.tokenizer
    for row in data["rows"]:
        documents = [answers()[d["row"]] for d in row["documents"]]
        held = [0] * len(documents)
        for segment in row["segments"]:
            ids = row["ids"][segment["start"] : segment["stop"]]
            for k in segment["documents"]:
                text = documents[k]["prompt"] + documents[k]["completion"] + tokenizer.eos_token
                whole = tokenizer(text)["input_ids"]
                assert whole[held[k] : held[k] + len(ids)] == ids
                assert segment["position"] == held[k]
                held[k] += len(ids)
        assert held == [d["stop"] - d["start"] for d in row["documents"]]
        assert sum(held) == row["realTokens"] > 1.5 * len(row["ids"])
        assert sum(row["counts"]) == sum(d["trained"] for d in row["documents"])
        words = "".join(data["texts"][i] for i in row["texts"][: row["segments"][0]["stop"]])
        assert (documents[0]["prompt"] + documents[0]["completion"]).startswith(words)


def test_a_run_without_shared_prefixes_has_no_segments():
    """The negative control: the data are the same, and so are the documents."""
    shared, apart = (data_of(page_of(shared_run(mode), max_rows=99)) for mode in ("bin", "off"))
    assert all("segments" not in row for row in apart["rows"])
    tokens = [sum(len(row["ids"]) for row in data["rows"]) for data in (shared, apart)]
    assert tokens[0] < tokens[1]
    assert f"<b>{tokens[0]:,}</b><span>computed, prefixes once" in page_of(shared_run())
    assert "computed, prefixes once" not in page_of(shared_run("off"))
    trained = [
        sum(d["trained"] for row in data["rows"] for d in row["documents"])
        for data in (shared, apart)
    ]
    assert trained[0] == trained[1]


def shared_run(mode: str = "bin") -> PreviewedRun:
    options = ["--max_length", "512", "--prefix_sharing", mode]
    return PreviewedRun.from_settings(answers(), tiny_tokenizer(), options)


def test_the_page_holds_the_batches_of_a_users_collator(tmp_path):
    collator = PackedCollator(pad_token_id=3, pad_to_multiple_of=32)
    args = PackedSFTConfig(str(tmp_path), max_length=40, use_cpu=True, bf16=False, report_to="none")
    tokenizer = tiny_tokenizer(chat=True)
    model = tiny_model("llama")
    trainer = PackedSFTTrainer(model, args, collator, chats(), processing_class=tokenizer)
    run = PreviewedRun.from_call(TrainerCall(model, args, chats(), tokenizer, collator))
    shown = joined(data_of(page_of(run, max_rows=99))["rows"], "ids")
    batches = [batch["input_ids"][0].tolist() for batch in trainer.get_train_dataloader()]
    assert shown == batches
    assert all(len(ids) % 32 == 0 for ids in shown)
    assert any(ids[-1] == 3 for ids in shown)


def test_rows_that_skip_preparation_are_shown_as_they_are():
    options = ["--max_length", "32", "--dataset_kwargs", '{"skip_prepare_dataset": true}']
    run = PreviewedRun.from_settings(tokenized(4), tiny_tokenizer(), options)
    rows = data_of(page_of(run))["rows"]
    found = {d["row"]: d["stop"] - d["start"] for row in rows for d in row["documents"]}
    assert found == {i: len(ids) for i, ids in enumerate(tokenized(4)["input_ids"][:])}


def test_a_stream_is_refused():
    stream = chats().to_iterable_dataset()
    args = PackedSFTConfig("unused", max_length=40, use_cpu=True, bf16=False, report_to="none")
    run = PreviewedRun.from_call(TrainerCall(None, args, stream, tiny_tokenizer(chat=True)))
    with pytest.raises(ValueError, match="a stream is packed while it is read"):
        page_of(run)


def test_a_long_row_is_drawn(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[9 + i % 200 for i in range(1500)]] * 30})
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), ["--max_length", "40000"])
    path = tmp_path / "rows.html"
    path.write_text(page_of(run), encoding="utf-8")
    with open_page(path) as page:
        assert page.evaluate("document.querySelectorAll('.token').length") == MAX_TOKENS
        assert "more tokens" in page.text("#documents")
        assert page.problems() == []


def test_other_settings_give_another_page():
    """The negative control of the comparison with the data loader."""
    runs = [
        PreviewedRun.from_settings(
            chats(), tiny_tokenizer(chat=True), ["--max_length", "64", *more]
        )
        for more in ([], ["--seed", "7"], ["--train_on", "assistant"])
    ]
    first, seed, labels = (data_of(page_of(run, max_rows=99))["rows"] for run in runs)
    assert joined(first, "ids") != joined(seed, "ids")
    assert joined(first, "ids") == joined(labels, "ids")
    assert joined(first, "labels") != joined(labels, "labels")


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_documents_know_their_row_and_their_uncut_length(overflow):
    tokenizer = tiny_tokenizer()
    texts = [" ".join(WORDS[:n]) for n in (2, 9, 1, 10, 3)]
    rows = Dataset.from_dict({"text": texts})
    options = ["--max_length", "12", "--overflow", overflow, "--shuffle_dataset", "true"]
    traced = trace_documents(PreviewedRun.from_settings(rows, tokenizer, options))
    lengths = [len(tokenizer(text + tokenizer.eos_token)["input_ids"]) for text in texts]
    assert traced.uncut.tolist() == [lengths[row] for row in traced.rows]
    for document, row in zip(traced.dataset, traced.rows.tolist(), strict=True):
        assert tokenizer.decode(document["input_ids"]) in texts[row] + tokenizer.eos_token
    kept = {row for row, length in enumerate(lengths) if overflow != "drop" or length <= 12}
    assert set(traced.rows.tolist()) == kept


def test_documents_to_look_at_are_marked():
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    ids = [[9, 10, eos], [11, 12, 13], [14, 15, 16, 17, 18, eos], [19, 20, eos]]
    rows = Dataset.from_dict(
        {
            "input_ids": ids,
            "labels": ids,
            "loss_weights": [[1.0] * 3, [1.0] * 3, [1.0] * 6, [1.0, 0.5, 1.0]],
        }
    )
    run = PreviewedRun.from_settings(rows, tokenizer, ["--max_length", "5"])
    found = {
        d["row"]: d["properties"] for row in data_of(page_of(run))["rows"] for d in row["documents"]
    }
    assert found == {0: [], 1: [NO_STOP_TOKEN], 2: [NO_STOP_TOKEN, CUT], 3: [WEIGHTED]}
    assert NOTHING_TRAINED not in str(found)


def test_a_document_with_weights_of_zero_trains_nothing():
    rows = tokenized(2, loss_weight=lambda lengths: [0.0, 1.0])
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), ["--max_length", "32"])
    found = {d["row"]: d["properties"] for d in data_of(page_of(run))["rows"][0]["documents"]}
    assert NOTHING_TRAINED in found[0]
    assert NOTHING_TRAINED not in found[1]


def test_a_row_is_added_for_a_property_that_the_first_rows_lack():
    lengths = [6] * 40
    rows = Dataset.from_dict(
        {
            "input_ids": [[9 + i] * n for i, n in enumerate(lengths)],
            "loss_weight": [1.0] * 39 + [2.0],
        }
    )
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), ["--max_length", "6", "--seed", "1"])
    data = data_of(page_of(run, max_rows=2))
    holders = [row for row in data["rows"] if any(d["row"] == 39 for d in row["documents"])]
    assert [row["reason"] for row in holders] == ["shown for a document: weighted"]


def test_the_page_is_bounded_and_says_what_is_left_out():
    rows = Dataset.from_dict({"input_ids": [[9, 10, 11, 12]] * 100})
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), ["--max_length", "8"])
    html = page_of(run, max_rows=3)
    assert len(data_of(html)["rows"]) == 3
    assert "3 rows of 50" in html
    few = data_of(page_of(run, max_tokens=20))["rows"]
    assert [len(row["ids"]) for row in few] == [8, 8]
    one = data_of(page_of(run, max_tokens=5))["rows"]
    assert [(row["stop"] - row["start"], len(row["ids"])) for row in one] == [(8, 5)]
    with pytest.raises(ValueError, match="max_rows=0"):
        page_of(run, max_rows=0)


# --- the texts of tokens --------------------------------------------------------------------------


@settings(max_examples=150)
@given(text=st.text(max_size=30))
def test_the_texts_of_tokens_add_up_to_the_document(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🙂b")["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert texts == ["a", *[""] * (len(ids) - 3), "🙂", "b"]


# --- in a browser ---------------------------------------------------------------------------------


def hostile_page(tmp_path):
    """Write a page of hostile texts, most of which are a token each, so that they stay whole."""
    rows = Dataset.from_dict({"prompt": ["Why? "] * len(HOSTILE), "completion": list(HOSTILE)})
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(HOSTILE[:-1]))
    run = PreviewedRun.from_settings(rows, tokenizer, ["--max_length", "64"])
    path = tmp_path / "rows.html"
    path.write_text(page_of(run, title=HOSTILE[0], command=HOSTILE[2]), encoding="utf-8")
    return path


def test_hostile_text_is_shown_and_never_run(tmp_path):
    path = hostile_page(tmp_path)
    assert not harmful(path.read_text(encoding="utf-8"))
    with open_page(path) as page:
        assert page.evaluate("window.hostile") is None
        found = ""
        for index in range(page.evaluate("document.querySelectorAll('.strip').length")):
            page.click(f".strip[data-row='{index}']")
            found += page.evaluate(
                "[...document.querySelectorAll('.token')].map((t) => t.textContent).join('')"
            )
        assert page.evaluate("window.hostile") is None
        assert page.evaluate("document.querySelectorAll('img, .hostile').length") == 0
        assert page.problems() == []
    assert all(text in found for text in HOSTILE if not harmful(text))
    assert "\\u202e\\x1b[2Jbackwards" in found


def test_the_same_text_would_run_if_it_were_not_escaped(tmp_path):
    path = hostile_page(tmp_path)
    unsafe = path.read_text(encoding="utf-8").replace(r"\u003c", "<").replace(r"\u003e", ">")
    path.write_text(unsafe, encoding="utf-8")
    with open_page(path) as page:
        assert page.evaluate("window.hostile") == 1


def test_characters_that_cannot_be_seen_are_shown_as_escapes():
    class TextOf:
        """A tokenizer whose tokens are the characters of one text."""

        def decode(self, ids, **options):
            return "".join(map(chr, ids))

    for text in ATTACKS.values():
        shown = token_texts([ord(character) for character in text], TextOf())
        assert "".join(shown) == text


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_tells_about_a_token(width, dark, tmp_path):
    run = PreviewedRun.from_settings(
        chats(), tiny_tokenizer(chat=True), ["--train_on", "assistant", "--max_length", "64"]
    )
    path = tmp_path / "rows.html"
    path.write_text(page_of(run, title="Rows · " + "a_long_name_" * 9), encoding="utf-8")
    with open_page(path, width=width, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        strip = page.evaluate("document.querySelector('.strip svg').getBoundingClientRect().width")
        assert 0.75 * width < strip < width
        assert page.evaluate("document.getElementById('tip').hidden")
        page.hover(".token[data-token='5']")
        tip = page.text("#tip")
        row = data_of(path.read_text())["rows"][0]
        assert str(row["ids"][5]) in tip
        assert str(row["labels"][5]) in tip
        for name in ("text", "id", "position", "label", "weight", "document", "boundary"):
            assert name in tip
        assert page.problems() == []


def test_a_shared_token_says_which_documents_share_it(tmp_path):
    path = tmp_path / "rows.html"
    path.write_text(page_of(shared_run()), encoding="utf-8")
    with open_page(path, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not page.evaluate("document.getElementById('tree').hidden")
        row = data_of(path.read_text())["rows"][0]
        assert page.evaluate("document.querySelectorAll('#tree g').length") == len(row["segments"])
        shared = next(s for s in row["segments"] if len(s["documents"]) > 1)
        own = next(s for s in row["segments"] if s["repeats"])
        page.hover(f".token[data-token='{shared['start']}']")
        assert f"{len(shared['documents'])} documents: " in page.text("#tip")
        page.hover(f".token[data-token='{own['start']}']")
        document = row["documents"][own["documents"][0]]
        assert f"row {document['row']} of the data" in page.text("#tip")
        assert "a copy for this branch" in page.text("#tip")
        assert "instead of" in page.text("#row-summary")
        assert page.problems() == []


def test_tokens_are_reached_by_touch_and_by_keyboard(tmp_path):
    run = PreviewedRun.from_settings(chats(), tiny_tokenizer(chat=True), ["--max_length", "64"])
    path = tmp_path / "rows.html"
    path.write_text(page_of(run), encoding="utf-8")
    with open_page(path, width=390) as page:
        page.evaluate("document.querySelector('.token[data-token=\"3\"]').click()")
        assert "position\n3" in page.text("#tip")
        event = "new KeyboardEvent('keydown', {key: '%s', bubbles: true})"
        press = f"document.activeElement.dispatchEvent({event})"
        page.evaluate(press % "ArrowRight")
        assert "position\n4" in page.text("#tip")
        page.evaluate(press % "Escape")
        assert page.evaluate("document.getElementById('tip').hidden")


def test_filters_leave_the_rows_that_hold_such_a_document(tmp_path):
    run = PreviewedRun.from_settings(chats(), tiny_tokenizer(chat=True), ["--max_length", "40"])
    path = tmp_path / "rows.html"
    path.write_text(page_of(run, max_rows=99), encoding="utf-8")
    rows = data_of(path.read_text())["rows"]
    holding = [any(CUT in d["properties"] for d in row["documents"]) for row in rows]
    assert any(holding)
    assert not all(holding)
    with open_page(path) as page:
        visible = "[...document.querySelectorAll('.strip')].map((s) => !s.hidden)"
        assert all(page.evaluate(visible))
        page.click("#filters button:nth-child(4)")
        assert page.evaluate(visible) == holding
        page.click("#filters button:nth-child(1)")
        assert all(page.evaluate(visible))


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_the_run(tmp_path, capsys):
    path = save_tiny_model(tmp_path / "model", "llama", chat=True)
    data = tmp_path / "chats.jsonl"
    chats().to_json(data)
    html = tmp_path / "rows.html"
    options = ["--model", str(path), "--data", str(data), "--max_length", "64"]
    assert main(["inspect", *options, "--rows", "0", "--html", str(html)]) == 0
    assert f"wrote {html}" in capsys.readouterr().err
    run = PreviewedRun.from_settings(
        chats(), tiny_tokenizer(chat=True), ["--max_length", "64"], str(path)
    )
    assert data_of(html.read_text())["rows"] == data_of(page_of(run))["rows"]
    assert main(["inspect", *options, "--html", str(tmp_path / "none" / "rows.html")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
