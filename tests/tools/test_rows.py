"""The page of packed rows shows the batches of the trainer, and any text without harm."""

import json
import re

import numpy as np
import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.attacks import harmful
from helpers.browser import HOSTILE, open_page
from helpers.command import run_command
from helpers.prepared import call_for, chats
from helpers.runs import (
    PROPERTIES,
    PackedEpoch,
    TrainerCall,
    flags_of,
    rows_page,
    run_of,
    run_of_call,
    run_of_settings,
    trace_documents,
)
from helpers.tiny import save_tiny_model, tiny_tokenizer
from helpers.vision import tiny_processor, tiny_vision_model, vision_trainer
from PIL import Image

from trl_packing import PackedCollator

NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED = PROPERTIES

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def answers(number: int = 24) -> Dataset:
    """Four answers to each question, which is longer than the shortest prefix that is shared."""
    questions = [" ".join((WORDS * 3)[i : i + 18]) for i in range(number // 4)]
    ends = [" ".join(WORDS[-1 - i * 5 % 9 :]) for i in range(number)]
    return Dataset.from_list(
        [{"prompt": questions[i // 4], "completion": f" {i} {end}"} for i, end in enumerate(ends)]
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


def weighted() -> Dataset:
    """Tokens with weights of their own, in documents with weights."""
    ids = [[10 + (i + k) % 250 for k in range(3 + i * 7 % 19)] for i in range(20)]
    rows = {"input_ids": ids, "labels": [[-100, -100, *row[2:]] for row in ids]}
    rows["loss_weights"] = [[0.1 * (k % 4) for k in range(len(row))] for row in ids]
    return Dataset.from_dict(rows | {"loss_weight": [0.5 + len(row) % 3 for row in ids]})


BINS = {"max_length": 64, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
SHARED = {"prefix_sharing": "bin", "max_length": 128}
SETTINGS = {
    "several bins": (chats, BINS | {"train_on": "last_assistant", "shuffle_dataset": True}),
    "split": (chats, {"max_length": 24, "overflow": "split", "pad_to_multiple_of": 16}),
    "documents per step": (chats, BINS | {"documents_per_step": 6}),
    "weights": (weighted, {"max_length": 32, "loss_weighting": "sqrt"}),
    "shared prefixes with weights": (
        lambda: answers().add_column("loss_weight", [0.5 + i for i in range(24)]),
        SHARED | {"per_device_train_batch_size": 2},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_page_holds_the_batches_of_the_data_loader(name, tmp_path):
    make, options = SETTINGS[name]
    options = {"per_device_train_batch_size": 1} | options
    tokenizer = tiny_tokenizer(chat=True)
    model = save_tiny_model(tmp_path / "model", "llama")
    epoch = PackedEpoch.of(run_of_settings(make(), tokenizer, flags_of(options), model))
    trainer = make_trainer(tmp_path, make(), tokenizer=tokenizer, **{"packing": True} | options)
    # After the check of a model.
    trainer._loaders.collators.packed.shares_prefixes = "shared" in name
    loader = trainer.get_train_dataloader()
    for number in (0, 1):
        loader.batch_sampler.set_epoch(number)
        epoch.sampler.set_epoch(number)
        batches = list(loader)
        rows = data_of(rows_page(epoch, max_rows=1000))["rows"]
        names = {"ids": "input_ids", "labels": "labels", "positions": "position_ids"}
        for shown, of_batch in names.items():
            assert joined(rows, shown) == [batch[of_batch][0].tolist() for batch in batches]
        if "loss_weights" in batches[0]:
            found = [np.float32(weights) for weights in joined(rows, "weights")]
            wanted = [batch["loss_weights"][0].numpy() for batch in batches]
            assert all(map(np.array_equal, found, wanted))
        else:
            assert {row["weights"] for row in rows} == {None}
        starts = {part["start"] for row in rows for part in row.get("segments", row["documents"])}
        assert starts <= {at for batch in batches for at in batch["cu_seq_lens_q"][:-1].tolist()}
    assert any("segments" in row for row in rows) == ("shared" in name)
    assert ("loss_weights" in batches[0]) == ("weights" in name)


def test_the_page_holds_the_batches_of_a_users_collator(tmp_path):
    collator = PackedCollator(pad_token_id=3, pad_to_multiple_of=32)
    tokenizer = tiny_tokenizer(chat=True)
    options = {"max_length": 40}
    trainer = make_trainer(tmp_path, chats(), tokenizer=tokenizer, collator=collator, **options)
    expected = [batch["input_ids"][0].tolist() for batch in trainer.get_train_dataloader()]
    run = run_of_call(TrainerCall(None, trainer.args, chats(), tokenizer, collator))
    assert joined(data_of(page_of(run, max_rows=99))["rows"], "ids") == expected
    assert any(3 in ids for ids in expected)


# --- shared prefixes ------------------------------------------------------------------------------


def shared_run(mode: str):
    return run_of(
        answers(), "--max_length", "512", "--prefix_sharing", mode, tokenizer=tiny_tokenizer()
    )


def test_a_page_of_shared_prefixes_says_who_holds_and_who_trains_a_token():
    tokenizer = tiny_tokenizer()
    page = page_of(shared_run("bin"), max_rows=99)
    data = data_of(page)
    for row in data["rows"]:
        documents = [answers()[d["row"]] for d in row["documents"]]
        held = [0] * len(documents)
        for segment in row["segments"]:
            ids = row["ids"][segment["start"] : segment["stop"]]
            for k in segment["documents"]:
                text = documents[k]["prompt"] + documents[k]["completion"] + tokenizer.eos_token
                assert segment["position"] == held[k]
                assert tokenizer(text)["input_ids"][held[k] : held[k] + len(ids)] == ids
                held[k] += len(ids)
        assert held == [d["stop"] - d["start"] for d in row["documents"]]
        assert sum(held) == row["realTokens"] > 1.5 * len(row["ids"])
        assert sum(row["counts"]) == sum(d["trained"] for d in row["documents"])
        words = "".join(data["texts"][i] for i in row["texts"][: row["segments"][0]["stop"]])
        assert (documents[0]["prompt"] + documents[0]["completion"]).startswith(words)
    tokens = sum(len(row["ids"]) for row in data["rows"])
    apart = page_of(shared_run("off"), max_rows=99)  # the negative control
    assert all("segments" not in row for row in data_of(apart)["rows"])
    assert tokens < sum(len(row["ids"]) for row in data_of(apart)["rows"])


# --- documents ------------------------------------------------------------------------------------


def test_documents_know_their_row_and_their_uncut_length():
    tokenizer = tiny_tokenizer()
    texts = [" ".join(WORDS[:n]) for n in (2, 9, 1, 10, 3)]
    options = ["--max_length", "12", "--overflow", "split", "--shuffle_dataset", "true"]
    run = run_of(Dataset.from_dict({"text": texts}), *options, tokenizer=tokenizer)
    traced = trace_documents(run)
    lengths = [len(tokenizer(text + tokenizer.eos_token)["input_ids"]) for text in texts]
    assert traced.uncut.tolist() == [lengths[row] for row in traced.rows]
    for document, row in zip(traced.dataset, traced.rows.tolist(), strict=True):
        assert tokenizer.decode(document["input_ids"]) in texts[row] + tokenizer.eos_token
    assert len(traced.rows) > len(set(traced.rows.tolist())) == 5


def test_documents_to_look_at_are_marked():
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    ids = [[9, 10, eos], [11, 12, 13], [14, 15, 16, 17, 18, eos], [19, 20, eos], [21, 22, eos]]
    weights = [[1.0] * 3, [1.0] * 3, [1.0] * 6, [1.0, 0.5, 1.0], [0.0] * 3]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids, "loss_weights": weights})
    run = run_of(rows, "--max_length", "5", tokenizer=tokenizer)
    documents = [d for row in data_of(page_of(run))["rows"] for d in row["documents"]]
    assert {d["row"]: d["properties"] for d in documents} == {
        0: [],
        1: [NO_STOP_TOKEN],
        2: [NO_STOP_TOKEN, CUT],
        3: [WEIGHTED],
        4: [NOTHING_TRAINED, WEIGHTED],
    }


def test_a_row_is_added_for_a_property_that_the_first_rows_lack():
    ids = [[9 + i] * 6 for i in range(40)]
    rows = Dataset.from_dict({"input_ids": ids, "loss_weight": [1.0] * 39 + [2.0]})
    data = data_of(page_of(run_of(rows, "--max_length", "6", "--seed", "1"), max_rows=2))
    holders = [row for row in data["rows"] if any(d["row"] == 39 for d in row["documents"])]
    assert [row["reason"] for row in holders] == ["shown for a document: weighted"]


def test_the_page_is_bounded_and_says_what_is_left_out():
    run = run_of(Dataset.from_dict({"input_ids": [[9, 10, 11, 12]] * 100}), "--max_length", "8")
    assert "3 rows of 50" in page_of(run, max_rows=3)
    assert [len(row["ids"]) for row in data_of(page_of(run, max_tokens=20))["rows"]] == [8, 8]
    one = data_of(page_of(run, max_tokens=5))["rows"]
    assert [(row["stop"] - row["start"], len(row["ids"])) for row in one] == [(8, 5)]


# --- images ---------------------------------------------------------------------------------------


def colored() -> Dataset:
    """Rows whose answers name the colors of their images, widths 24, 32, 40."""
    rows = []
    for number in range(9):
        names = [["red", "green", "blue"][(number + n) % 3] for n in range(number % 3)]
        images = [Image.new("RGB", (24 + 8 * (number % 3), 24), name) for name in names]
        question = [{"type": "image", "text": None}] * len(names)
        question += [{"type": "text", "text": f"Question {number}?"}]
        answer = [{"type": "text", "text": " ".join(names) or "none"}]
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": images, "messages": said})
    return Dataset.from_list(rows)


def test_images_stand_at_the_tokens_of_their_document(tmp_path):
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor)
    options = {"max_length": 128, "per_device_train_batch_size": 2, "train_on": "assistant"}
    call = call_for(colored(), None, processor, model, **options)
    epoch = PackedEpoch.of(run_of_call(call))
    rows = data_of(rows_page(epoch, max_rows=100))["rows"]
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for row in rows:
        at = [i for i, token in enumerate(row["ids"]) if token == pad]
        assert at == [i for image in row["images"] for i in range(image["start"], image["stop"])]
        for document in row["documents"]:
            inside = range(document["start"] - row["start"], document["stop"] - row["start"])
            sizes = [image["size"] for image in row["images"] if image["start"] in inside]
            assert sizes == [f"{24 + 8 * (document['row'] % 3)} × 24"] * (document["row"] % 3)
    assert sum(len(row["images"]) for row in rows) == 9
    trainer = vision_trainer(model, processor, tmp_path, colored(), **options)
    batches = list(trainer.get_train_dataloader())
    assert joined(rows, "ids") == [batch["input_ids"][0].tolist() for batch in batches]


# --- in a browser ---------------------------------------------------------------------------------


def test_hostile_text_is_shown_and_never_run(tmp_path):
    rows = Dataset.from_dict({"prompt": ["Why? "] * len(HOSTILE), "completion": list(HOSTILE)})
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(HOSTILE[:-1]))  # most texts are a token each, so they stay whole
    run = run_of(rows, "--max_length", "64", tokenizer=tokenizer)
    path = tmp_path / "rows.html"
    text = page_of(run, title=HOSTILE[0], command=HOSTILE[2])
    path.write_text(text, encoding="utf-8")
    assert not harmful(text)
    tokens = "[...document.querySelectorAll('.token')].map((t) => t.textContent).join('')"
    with open_page(path) as page:
        found = ""
        for index in range(page.evaluate("document.querySelectorAll('.strip').length")):
            page.click(f".strip[data-row='{index}']")
            found += page.evaluate(tokens)
        assert page.problems() == []
    assert all(text in found for text in HOSTILE if not harmful(text))
    assert "\\u202e\\x1b[2Jbackwards" in found
    path.write_text(text.replace(r"\u003c", "<").replace(r"\u003e", ">"), encoding="utf-8")
    with open_page(path) as page:  # the negative control
        assert page.evaluate("window.hostile") == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_rows_filters_and_tokens_are_explored(tmp_path, width, capsys):
    model = save_tiny_model(tmp_path, "llama", chat=True)
    answers().to_json(tmp_path / "rows.jsonl")
    words = ["--model", str(model), "--data", str(tmp_path / "rows.jsonl")]
    words += ["--max_length", "100", "--prefix_sharing", "bin", "--hub_token", "hf_123"]
    path = tmp_path / "rows.html"
    assert run_command(["inspect", *words, "--rows", "0", "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    row = data_of(path.read_text())["rows"][0]
    shared = next(s for s in row["segments"] if len(s["documents"]) > 1)
    own = next(s for s in row["segments"] if s["repeats"])
    event = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    visible = "[...document.querySelectorAll('.strip')].filter((s) => !s.hidden).length"
    with open_page(path, width=width, dark=width == 390) as page:
        # Title and command are those of the arguments, not of this process, without secrets.
        assert page.text("h1").startswith("Packed rows · rows.jsonl")
        assert page.text("section:last-of-type pre").startswith("trl-packing inspect --model ")
        assert "hf_123" not in page.text()
        assert page.evaluate("document.querySelectorAll('#tree g').length") == len(row["segments"])
        page.hover(f".token[data-token='{shared['start']}']")
        assert f"{len(shared['documents'])} documents: " in page.text("#tip")
        page.hover(f".token[data-token='{own['start']}']")
        assert "a copy for this branch" in page.text("#tip")
        page.evaluate("document.querySelector('.token[data-token=\"3\"]').click()")
        page.evaluate(f"document.activeElement.dispatchEvent({event})")
        for fact in (row["ids"][4], row["labels"][4], "position\n4", "weight", "boundary"):
            assert str(fact) in page.text("#tip")
        rows = page.evaluate(visible)
        page.click("#filters button:not(:first-child):not(:disabled)")
        assert 0 < page.evaluate(visible) <= rows
        assert page.problems() == []
