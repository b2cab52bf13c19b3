"""`max_length`, truncation, packing strategies and padding do to a document what they do in TRL."""

import contextlib

import pytest
from datasets import Dataset
from helpers.drop_in import both_modes, documents, packed_only, train_moves_all, trainer_for
from helpers.tiny import tiny_dataset, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", [7, 8, 9]), ("keep_end", [9, 10, 11])])
def test_truncation_keeps_one_end(tmp_path, mode, kept):
    rows = [{"input_ids": [7, 8, 9, 10, 11]}, {"input_ids": [20, 21]}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=3, truncation_mode=mode)
    assert [ids for ids, _ in documents(trainer.train_dataset)] == [kept, [20, 21]]


@pytest.mark.parametrize("max_length", [3, None])
def test_masked_documents_keep_their_place_without_max_length(tmp_path, max_length):
    rows = [
        {"input_ids": [7, 8, 9], "labels": [-100, -100, -100]},
        {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]},
    ]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=max_length)
    kept = [ids for ids, _ in documents(trainer.train_dataset)]
    assert kept == ([[7, 8, 9]] if max_length is None else []) + [[20, 21, 22]]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped", "bfd-requeue"])
def test_packing_strategies_of_trl(tmp_path, strategy):
    with pytest.warns(FutureWarning) if strategy == "bfd-requeue" else contextlib.nullcontext():
        trainer = trainer_for(
            tmp_path,
            "language_modeling",
            packing=True,
            packing_strategy=strategy,
            max_length=24,  # leaves no piece of one token, which would have nothing to train
            num_train_epochs=1,
        )
    assert all(len(ids) <= 24 for ids, _ in documents(trainer.train_dataset))
    total = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    everything = sum(
        len(tiny_tokenizer()(row["text"] + "<eos>")["input_ids"]) for row in tiny_dataset()
    )
    if strategy == "bfd":  # cuts
        assert total < everything
    else:
        assert total == everything
    train_moves_all(trainer)


@packed_only
def test_padding_free_enforces_max_length(tmp_path):
    trainer = trainer_for(tmp_path, "tokenized", padding_free=True, max_length=10)
    assert {len(ids) for ids, _ in documents(trainer.train_dataset)} == {10}
    train_moves_all(trainer)


@both_modes
def test_pad_to_multiple_of(tmp_path, packing):
    widths = []
    model = tiny_model("llama")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer = trainer_for(
        tmp_path, "language_modeling", model=model, packing=packing, pad_to_multiple_of=16
    )
    arguments = trainer.get_train_dataloader()
    assert all(batch["input_ids"].shape[1] % 16 == 0 for batch in arguments)
    train_moves_all(trainer)
