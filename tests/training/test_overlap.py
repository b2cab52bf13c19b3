"""Runs with `overflow="overlap"`: pieces repeat a context, and each token is trained once."""

import json
from pathlib import Path

import pytest
import torch
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from helpers.by_hand import assert_same_step, by_hand, one_step, weighted
from helpers.distributed.same_steps import Run, assert_same_steps, joined, on_ranks, trained
from helpers.one_step import ONE_STEP
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX

SHARED = Path(__file__).parents[3] / "shared" / "data"
OVERLAP = {"overflow": "overlap", "overlap_tokens": 6}
PER_TOKEN = ("input_ids", "labels", "loss_weights")


def pieces_by_hand(documents, capacity, overlap=6, masked=True):
    """Return the pieces of all documents, cut one after the other; `masked`: with contexts."""
    pieces = []
    for document in documents:
        start, length = 0, len(document["input_ids"])
        while True:
            stop = min(start + capacity, length)
            cut = {k: v[start:stop] if k in PER_TOKEN else v for k, v in document.items()}
            if start and masked:
                cut["labels"] = [IGNORE_INDEX] * overlap + list(cut["labels"][overlap:])
            if any(label != IGNORE_INDEX for label in cut["labels"][1:]):
                pieces.append(cut)
            if stop == length:
                break
            start = stop - overlap
    return pieces


def num_trained(documents):
    return sum(label != IGNORE_INDEX for d in documents for label in d["labels"][1:])


def tokens_of(dataset):
    return [{k: list(row[k]) for k in ("input_ids", "labels")} for row in dataset]


def text_trainer(rows, folder, tokenizer, **options):
    return PackedSFTTrainer(
        tiny_model("llama"),
        PackedSFTConfig(str(folder), **ONE_STEP, **options),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def test_pieces_by_hand_train_every_token_once():
    documents = documents_of_lengths([70, 20, 33, 1, 48])
    pieces = pieces_by_hand(documents, 24)
    assert len(pieces) > 8
    assert num_trained(pieces) == num_trained(documents)
    # The control: without a mask on contexts, they are trained again.
    assert num_trained(pieces_by_hand(documents, 24, masked=False)) > num_trained(documents)


RUNS = {
    "packed": {},
    "padding-free": {"packing": False, "per_device_train_batch_size": 99},
    "documents weighted": {"loss_weighting": "document"},
    "processes": {"dataset_num_proc": 2, "dataloader_num_workers": 1},
    "a stream": {"stream": True},
}


@pytest.mark.parametrize(
    "name",
    [n if n in ("packed", "a stream") else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)
def test_a_step_is_that_of_the_pieces_one_at_a_time(name, tmp_path):
    options = dict(RUNS[name])
    documents = [d | {"loss_weight": 1.0 + n} for n, d in enumerate(weighted(tiny_documents()))]
    pieces = pieces_by_hand(documents, 24)
    rows = Dataset.from_list(documents)
    rows = rows.to_iterable_dataset() if options.pop("stream", False) else rows
    model = tiny_model("llama")
    options |= OVERLAP | {
        "max_length": 24,
        "loss_weighting": options.get("loss_weighting", "token"),
    }
    options.setdefault("per_device_train_batch_size", 40)
    found = one_step(model, rows, tmp_path, **options)
    assert_same_step(found, by_hand(model, pieces, weighting=options["loss_weighting"]))
    # The control: contexts that are trained again are another step.
    again = pieces_by_hand(documents, 24, masked=False)
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(model, again, weighting=options["loss_weighting"]))


def chats(number=10):
    return [
        {
            "messages": [
                {"role": role, "content": f"{word} {i}, {turn}: " + "and so on " * (i % 4 + turn)}
                for turn in range(1 + i % 3)
                for role, word in (("user", "Question"), ("assistant", "Answer"))
            ]
        }
        for i in range(number)
    ]


@pytest.mark.parametrize("train_on", ["every_turn", "assistant"])
def test_turns_are_cut_as_documents(train_on, tmp_path):
    """A piece has the context of its own turn, and one without a target is left out."""

    def prepared(rows, **options):
        tokenizer = tiny_tokenizer(chat=True)
        made = text_trainer(rows, tmp_path, tokenizer, train_on=train_on, **options)
        return tokens_of(made.train_dataset)

    rows = Dataset.from_list(chats())
    whole = prepared(rows, max_length=4096)
    assert len(whole) == (19 if train_on == "every_turn" else 10)
    pieces = pieces_by_hand(whole, 40)
    assert len(pieces) > len(whole)
    assert num_trained(pieces) == num_trained(whole)
    assert prepared(rows, max_length=40, **OVERLAP) == pieces
    assert prepared(rows.to_iterable_dataset(), max_length=40, **OVERLAP) == pieces
    assert prepared(rows, max_length=40, overflow="split") != pieces, "the control"


# --- resuming, ranks ------------------------------------------------------------------------------

LONG = documents_of_lengths([5 + (i * 23) % 71 for i in range(24)])
KINDS = {
    "packed": {"packing": True, "per_device_train_batch_size": 1},
    "documents_per_step": {"documents_per_step": 6},
    "a stream": {"packing": True, "per_device_train_batch_size": 1, "max_steps": 8},
}


def run_of(folder, kind, accumulation=1, **settings):
    return Run(
        str(folder / kind),
        "PackedSFTTrainer",
        LONG,
        settings=OVERLAP
        | KINDS[kind]
        | {"max_length": 24, "gradient_accumulation_steps": accumulation}
        | settings,
        shards=2 if kind == "a stream" else None,
    )


@pytest.mark.slow
def test_two_ranks_train_the_pieces_that_one_trains(tmp_path):
    runs = {kind: run_of(tmp_path, kind) for kind in KINDS}
    expected = {tuple(p["input_ids"]) for p in pieces_by_hand(LONG, 24)}
    for kind, ranks in on_ranks(runs, tmp_path / "ranks").items():
        found = joined(ranks)
        documents = {d for step in found["documents"].values() for d in step}
        if kind != "a stream":  # one rank reads its shards in another order
            assert_same_steps(trained(run_of(tmp_path / "one", kind, accumulation=2)), found)
            assert documents == expected
        assert documents <= expected
        assert len(found["losses"]) > 7


# --- real data ------------------------------------------------------------------------------------


def gsm8k(number):
    file = SHARED / "gsm8k_train.jsonl"
    if not file.exists():
        pytest.skip(f"no real data: {file} does not exist")
    rows = [json.loads(line) for line in file.read_text().splitlines()[:number]]
    return Dataset.from_list(
        [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]
    )


@pytest.mark.shared
def test_pieces_of_real_documents_train_every_token_once(tmp_path):
    rows = gsm8k(200)

    def prepared(dataset=rows, **options):
        trainer = text_trainer(dataset, tmp_path, tiny_tokenizer(), **options)
        return trainer, tokens_of(trainer.train_dataset)

    _, whole = prepared(max_length=8192)
    trainer, pieces = prepared(max_length=256, **OVERLAP)
    assert pieces == pieces_by_hand(whole, 256)
    assert len(pieces) > len(whole) == 200
    assert num_trained(pieces) == num_trained(whole)
    _, streamed = prepared(rows.to_iterable_dataset(4), max_length=256, **OVERLAP)
    assert streamed == pieces
    counts = trainer.packing_report.preparation
    losses = [stage.lost for stage in counts.stages]
    assert sum(losses, counts.after) == counts.before
    assert counts.after.trained == counts.before.trained == num_trained(whole)
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
