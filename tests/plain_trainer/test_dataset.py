"""`PackedDataset` holds every document once, in rows that any data loader joins."""

import pytest
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from helpers.plain_runs import DOCUMENTS, LENGTHS, PACK_LEN, packed, trainer_of
from helpers.tiny import tiny_model
from torch.utils.data import BatchSampler, DataLoader
from transformers import DefaultDataCollator, Trainer

from trl_packing import PackedDataset, RepackEveryEpoch, enable_packing

TOKENS = sorted(t for document in DOCUMENTS for t in document["input_ids"])


def test_rows_hold_every_document_once_and_number_it():
    dataset = packed()
    seen = []
    for row in dataset[:]:
        numbers = row["attention_mask"].tolist()
        assert len(numbers) == len(row["input_ids"]) <= PACK_LEN
        assert numbers == sorted(numbers)
        assert min(numbers) == (2 if len(set(numbers)) == 1 else 1)
        for number in range(min(numbers), max(numbers) + 1):
            here = row["attention_mask"] == number
            assert row["labels"][here][0] == -100
            seen.append(row["input_ids"][here].tolist())
    assert sorted(seen) == sorted(document["input_ids"] for document in DOCUMENTS)


def test_a_data_loader_joins_the_rows_of_a_micro_batch():
    model = tiny_model("llama")
    dataset = packed()
    enable_packing(model)
    loader = DataLoader(dataset, batch_size=3, collate_fn=DefaultDataCollator(), num_workers=1)
    batches = list(loader)
    assert all(len(batch["input_ids"]) == 1 for batch in batches)
    first = batches[0]["attention_mask"][0]
    assert first.max() == sum(len(dataset.plan[row]) for row in range(3))
    assert sum(int((b["labels"] != -100).sum()) for b in batches) == sum(
        max(length - 2, 0) for length in LENGTHS
    )


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="document 1 has 60 tokens but pack_len is 50"):
        PackedDataset(Dataset.from_list(DOCUMENTS), None, 50)
    padded = [DOCUMENTS[0] | {"attention_mask": [0, 1, 1]}]
    with pytest.raises(ValueError, match=r"document 0 .* tokenize without padding"):
        PackedDataset(padded, None, 50)
    with pytest.raises(ValueError, match="'labels' has a null row"):  # those of row 1 are read, too
        PackedDataset(
            [{"input_ids": [1, 2, 3]}, DOCUMENTS[0] | {"labels": [-100, -100, 3]}], None, 50
        )
    for column, value in (("loss_weights", [1.0] * 3), ("seq_lengths", [2, 1])):
        rows = Dataset.from_list([{**DOCUMENTS[0], column: value}])
        with pytest.raises(ValueError, match=f"the data set has {column}.*PackedSFTTrainer"):
            PackedDataset(rows, None, 50)


def rows_of_ranks(dataset, ranks, batch_size):
    """The row indices that accelerate gives to each rank in an epoch."""
    batches = BatchSampler(range(len(dataset)), batch_size, drop_last=False)
    return [i for r in range(ranks) for b in BatchSamplerShard(batches, ranks, r) for i in b]


def test_with_a_multiple_of_rows_no_rank_trains_a_row_twice():
    dataset = packed()
    assert len(rows_of_ranks(dataset, 4, 2)) > len(dataset)  # what the multiple is for
    even = packed(rows_multiple_of=8)
    assert sorted(rows_of_ranks(even, 4, 2)) == list(range(len(even)))
    assert sorted(int(t) for row in even[:] for t in row["input_ids"]) == TOKENS
    with pytest.raises(ValueError, match="rows_multiple_of=0 must be at least 1"):
        packed(rows_multiple_of=0)


def batches_of(folder, dataset, repacks, resume=None, **options):
    """Return the tokens of every micro-batch that a Trainer runs in two epochs."""
    model = tiny_model("llama")
    seen = []
    enable_packing(model)

    class Recording(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(inputs["input_ids"][0].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    options |= {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "random"}
    options["callbacks"] = [RepackEveryEpoch(dataset)] if repacks else []
    trainer_of(model, dataset, folder, cls=Recording, **options).train(resume)
    return seen


def test_rows_are_drawn_anew_every_epoch_if_asked_for(tmp_path):
    half = len(packed())
    same = batches_of(tmp_path, packed(), False)
    assert sorted(same[:half]) == sorted(same[half:])
    steps = {"save_strategy": "steps", "save_steps": half + 2}
    anew = batches_of(tmp_path, packed(), True, **steps)
    assert sorted(anew[:half]) != sorted(anew[half:])
    for epoch in (anew[:half], anew[half:]):
        assert sorted(t for row in epoch for t in row) == TOKENS
    # A resumed run sees the batches that it would have seen.
    checkpoint = str(tmp_path / f"checkpoint-{half + 2}")
    assert batches_of(tmp_path / "again", packed(), True, checkpoint, **steps) == anew[half + 2 :]
