"""Ids, labels and lengths that a model cannot read are named before it runs on any of them."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from harness import make_trainer
from helpers.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from trl import SFTConfig

from trl_packing import PackedDataset, PackedSFTConfig, enable_packing
from trl_packing.config import check_options
from trl_packing.data.limits import ModelLimits, limits_of

GOOD = {"input_ids": [7, 8, 9, 10], "labels": [-100, 8, 9, 10]}
BAD = {
    "an id beyond": ({**GOOD, "input_ids": [7, 8, 5000, 10]}, "has token id 5000, but the model's"),
    "a negative id": ({**GOOD, "input_ids": [7, 8, -5, 10]}, "has token id -5, but"),
    "a label beyond": ({**GOOD, "labels": [-100, 8, 320, 10]}, "has label 320, but the model's"),
    "label -1": ({**GOOD, "labels": [-1, -1, 9, 10]}, "has label -1, but"),
}
bad_rows = pytest.mark.parametrize(("bad", "sentence"), BAD.values(), ids=BAD)


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def with_bad(bad, number=40):
    """`bad` is row 31: no probe of the isolation check reads it."""
    return [bad if i == 31 else GOOD for i in range(number)]


def trainer_for(folder, rows, evaluated=None, model="llama", changes=None, **settings):
    model = tiny_model(model, **(changes or {}))
    settings = {"max_length": 64, "max_steps": 40, **settings}
    return make_trainer(folder, rows, model, evaluated=evaluated, **settings)


@bad_rows
def test_the_training_set_is_looked_at_before_the_model_runs(tmp_path, bad, sentence):
    with pytest.raises(ValueError, match=f"document 31 of the train dataset {sentence}"):
        trainer_for(tmp_path, with_bad(bad))


@bad_rows
def test_evaluation_sets_are_looked_at_before_training(tmp_path, bad, sentence):
    sets = {"good": Dataset.from_list([GOOD]), "web": Dataset.from_list(with_bad(bad))}
    with pytest.raises(ValueError, match=f"document 31 of the web dataset {sentence}"):
        trainer_for(tmp_path, [GOOD] * 8, sets)


def test_the_first_documents_of_an_evaluation_stream_are_looked_at_before_training(tmp_path):
    bad, sentence = BAD["an id beyond"]
    with pytest.raises(ValueError, match=f"document 31 of the eval dataset {sentence}"):
        trainer_for(tmp_path, [GOOD] * 8, stream(with_bad(bad)))


@bad_rows
@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("skips", [False, True], ids=["prepared", "as it is"])
def test_sets_that_come_later_are_looked_at(tmp_path, bad, sentence, method, skips):
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}} if skips else {}
    trainer = trainer_for(tmp_path, [GOOD] * 8, **settings)
    with pytest.raises(ValueError, match=f"document 31 of the .* {sentence}"):
        getattr(trainer, method)(Dataset.from_list(with_bad(bad)))
    getattr(trainer, method)(Dataset.from_list([GOOD] * 8))  # and good ones pass


@bad_rows
@pytest.mark.parametrize("early", [False, True])
def test_a_stream_is_looked_at_as_it_is_read(tmp_path, bad, sentence, early):
    rows = [bad] * early + with_bad(bad)
    trainer = trainer_for(tmp_path, stream(rows))
    with pytest.raises(ValueError, match=rf"(document|row) {0 if early else 31} of .* {sentence}"):
        trainer.train()


@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_stream_is_looked_at(tmp_path, padded):
    bad, sentence = BAD["an id beyond"]
    trainer = trainer_for(tmp_path, [GOOD] * 8, prediction_loss_only=not padded)
    if padded:
        trainer.compute_metrics = lambda prediction: {}
    with pytest.raises(ValueError, match=f"document 31 of the stream {sentence}"):
        trainer.evaluate(stream(with_bad(bad)))


def test_bad_documents_are_counted_and_rows_left_out_are_not(tmp_path):
    bad, _ = BAD["an id beyond"]
    rows = Dataset.from_list([bad, GOOD, GOOD, bad, GOOD, bad])
    with pytest.raises(ValueError, match=r"document 0 .*\(3 such rows\)$"):
        trainer_for(tmp_path, rows)
    trainer = trainer_for(tmp_path, rows.select([1, 2, 4]), max_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match=r"document 1 .*tokenizer[?]$"):
        trainer_for(tmp_path, rows.select([4, 3]))


def test_the_vocabulary_is_the_rows_of_the_embeddings(tmp_path):
    model = tiny_model("llama")
    model.resize_token_embeddings(VOCAB_SIZE + 8)
    assert limits_of(model) == ModelLimits(VOCAB_SIZE + 8, None)


@pytest.mark.parametrize("streamed", [False, True])
def test_documents_beyond_learned_positions_are_named(tmp_path, streamed):
    long = {"input_ids": [7] * 60, "labels": [7] * 60}
    rows = stream(with_bad(long)) if streamed else with_bad(long)
    with pytest.raises(ValueError, match=r"document 31 .*60 tokens.*learned 48 positions; set max"):
        trainer_for(tmp_path, rows, model="gpt2", changes={"n_positions": 48}).train()
    cut = trainer_for(
        tmp_path, rows, model="gpt2", changes={"n_positions": 48}, max_length=48, max_steps=1
    )
    cut.train()


@pytest.mark.parametrize("positions", [4, 16])
def test_a_model_with_few_learned_positions_is_checked_and_trained(tmp_path, positions):
    rows = [{"input_ids": [7, 8, 9, 5][:n], "labels": [7, 8, 9, 5][:n]} for n in (4, 3, 2, 4)]
    changes = {"n_positions": positions}
    trainer = trainer_for(
        tmp_path, Dataset.from_list(rows), model="gpt2", changes=changes, max_length=positions
    )
    assert trainer.train().global_step == 40


@pytest.mark.parametrize(
    ("name", "changes", "positions"),
    [("gpt2", {"n_positions": 32}, 32), ("llama", {"max_position_embeddings": 32}, None)],
)
def test_only_learned_positions_end(name, changes, positions):
    assert limits_of(tiny_model(name, **changes)).positions == positions


def test_packed_rows_are_measured_by_their_documents():
    limits = ModelLimits(positions=4)
    rows = [{"input_ids": [7] * 8, "labels": [7] * 8, "seq_lengths": [4, 4]}]
    limits.check(Dataset.from_list(rows), "train")
    limits.check_document(rows[0], "row 0")
    rows[0]["seq_lengths"] = [3, 5]
    with pytest.raises(ValueError, match="has 5 tokens"):
        limits.check(Dataset.from_list(rows), "train")
    with pytest.raises(ValueError, match="has 5 tokens"):
        limits.check_document(rows[0], "row 0")


@bad_rows
def test_packed_rows_for_any_trainer_are_looked_at(bad, sentence):
    with pytest.raises(ValueError, match=f"document 31 {sentence}|document 31 of the data set"):
        enable_packing(
            tiny_model("llama"),
            PackedDataset(Dataset.from_list(with_bad(bad)), tiny_tokenizer(), 16),
        )
    with pytest.raises(ValueError, match=f"document 31 of the data set {sentence}"):
        enable_packing(tiny_model("llama"), PackedDataset(with_bad(bad), tiny_tokenizer(), 16))


def test_documents_shown_to_enable_packing_are_looked_at():
    with pytest.raises(ValueError, match="document 1 has token id 5000"):
        enable_packing(tiny_model("llama"), [np.array([7, 8]), np.array([7, 5000])])
    with pytest.raises(ValueError, match="document 0 has 40 tokens"):
        enable_packing(tiny_model("gpt2", n_positions=32), [np.full(40, 7)])


@pytest.mark.parametrize("value", [0, -8, 2.5, "0", "-8"])
def test_padding_to_a_multiple_that_is_none_is_refused(tmp_path, value):
    read = int(value) if isinstance(value, str) else value  # TRL reads a number that is a text
    with pytest.raises(ValueError, match=f"pad_to_multiple_of={read!r} must be"):
        PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False, pad_to_multiple_of=value)


@pytest.mark.parametrize(("value", "read"), [("8", 8), ("none", None), ("auto", None), (8, 8)])
def test_padding_to_a_multiple_is_read_as_trl_reads_it(tmp_path, value, read):
    """The command line passes a text."""
    for config in (PackedSFTConfig, SFTConfig):
        args = config(str(tmp_path), use_cpu=True, bf16=False, pad_to_multiple_of=value)
        assert args.pad_to_multiple_of == read


def test_a_set_multiple_that_is_a_text_is_refused(tmp_path):
    """Set later, no config of TRL reads it."""
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=64)
    args.pad_to_multiple_of = "8"
    with pytest.raises(ValueError, match="pad_to_multiple_of='8' must be a whole number, or None"):
        check_options(args)
