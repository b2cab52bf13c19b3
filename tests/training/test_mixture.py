"""Data sets as sources: prepared each by its own form, drawn by shares, resumed to the bit."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from harness import TWO_RUNS, make_trainer
from helpers.combinations import fast
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_tokenizer

from trl_packing import PackedSFTTrainer
from trl_packing.training.columns import documents_of

LENGTHS = [3 + (i * 7) % 29 for i in range(60)]
SETS = {"math": 40, "chat": 20}
MIXTURE = {"math": {"epochs": 0.4}, "chat": {"epochs": 1.5}}
EPOCHS = 3


def trainer_of(folder, train_dataset, **options) -> PackedSFTTrainer:
    options = {"max_length": 64, "isolation_check": "off", **options}
    return make_trainer(
        folder, train_dataset, tokenizer=tiny_tokenizer(chat="generation"), **options
    )


def tokenized(sizes: dict[str, int], **more) -> dict[str, Dataset]:
    """Return a data set of documents for each source; sources have tokens of their own."""
    rows = iter(documents_of_lengths(LENGTHS[: sum(sizes.values())]))
    return {
        name: Dataset.from_list([next(rows) | more for _ in range(number)])
        for name, number in sizes.items()
    }


def drawn(trainer, epoch=0) -> Counter:
    """Return how often the epoch draws documents of each source."""
    loader = trainer.get_train_dataloader()
    sampler = loader.batch_sampler
    sampler = getattr(sampler, "batch_sampler", sampler)
    sampler.set_epoch(epoch)
    feature = trainer.train_dataset.features["trl_packing_source"]
    ids = trainer.train_dataset["trl_packing_source"][:]
    return Counter(feature.int2str(ids[d]) for batch in sampler.micro_batches() for d in batch)


# --- a dictionary of data sets --------------------------------------------------------------------


def test_a_dictionary_trains_the_batches_of_its_data_sets_joined(tmp_path):
    joined = run(Scenario(str(tmp_path), LENGTHS, epochs=2, batch_size=2))
    apart = run(Scenario(str(tmp_path), LENGTHS, epochs=2, batch_size=2, sets=SETS))
    assert apart["batches"] == joined["batches"]
    for name, parameter in joined["parameters"].items():
        assert torch.equal(apart["parameters"][name], parameter), name


FORMS = (
    "language_modeling",
    "prompt_completion",
    "conversational_language_modeling",
    "conversational_prompt_completion",
)


def test_rows_of_every_form_become_the_documents_that_they_are_alone(tmp_path):
    """Prompts of one source are not trained because another has none, whichever comes first."""
    sets = {name: tiny_dataset(name, 6) for name in FORMS}
    together = trainer_of(tmp_path, sets).train_dataset
    found = documents_of(together, None)
    alone = [
        document
        for rows in sets.values()
        for document in documents_of(trainer_of(tmp_path, rows).train_dataset, None)
    ]
    assert len(found) == len(alone) == 24
    for one, other in zip(found, alone, strict=True):
        for column in ("input_ids", "labels"):
            assert one[column].tolist() == other[column].tolist()
    labels = [document["labels"] for document in alone]
    assert (labels[7][1:] == -100).any(), "a prompt is not trained"
    assert not (labels[1][1:] == -100).any(), "running text is trained whole"


@pytest.mark.parametrize(
    ("train_dataset", "sentence"),
    [
        (lambda sets: DatasetDict(train=sets["a"]), "got a DatasetDict of the splits train"),
        (lambda sets: {}, "empty dictionary"),
        (lambda sets: {3: sets["a"]}, r"train_dataset\[3\] is a Dataset.*name each source"),
        (lambda sets: {"a": sets["a"], "b": [1]}, r"train_dataset\['b'\] is a list"),
        (lambda sets: sets | {"b": sets["b"].to_iterable_dataset()}, "streams beside data sets"),
        (lambda sets: sets | {"b": sets["b"].select([])}, "the train dataset is empty"),
        (
            lambda sets: sets | {"b": Dataset.from_dict({"images": [[]], "prompt": ["a"]})},
            "which only packed runs train, .* has images, .* llama",
        ),
        (
            lambda sets: sets | {"b": Dataset.from_list([{"input_ids": [1], "labels": [-100]}])},
            "of the 'b' dataset has a trained token",
        ),
    ],
)
def test_a_dictionary_that_is_no_training_set_is_refused(tmp_path, train_dataset, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        trainer_of(tmp_path, train_dataset(tokenized({"a": 8, "b": 8})))


def test_weights_of_sources_may_be_whole_in_one_and_parts_in_another(tmp_path):
    sets = tokenized({"a": 4}, loss_weight=1) | tokenized({"b": 4}, loss_weight=0.5)
    trainer = trainer_of(tmp_path, sets)
    assert trainer.train_dataset["loss_weight"][:] == [1.0] * 4 + [0.5] * 4
    wrong = sets | tokenized({"c": 4}, loss_weight=[1.0])
    with pytest.raises(ValueError, match="loss_weight"):
        trainer_of(tmp_path, wrong)
    streams = {name: rows.to_iterable_dataset() for name, rows in sets.items()}
    mixture = {name: {"weight": 1} for name in streams}
    with pytest.raises(ValueError, match=r"key loss_weight.*float64.*int64"):
        trainer_of(tmp_path, streams, mixture=mixture, max_steps=1)


def test_a_column_that_the_user_names_has_one_type(tmp_path):
    sets = tokenized({"a": 4}, hardness=1) | tokenized({"b": 4}, hardness=0.5)
    with pytest.raises(ValueError, match=r"'hardness'.*int64.*\['a'\].*float64.*cast_column"):
        trainer_of(tmp_path, sets, curriculum="hardness")
    # Tokens are widened: one source may be rows of text, and another be tokenized already.
    sets = tokenized({"a": 4}) | {"b": tiny_dataset("language_modeling", 6)}
    assert len(trainer_of(tmp_path, sets).train_dataset) == 10


# --- shares ---------------------------------------------------------------------------------------


def test_epochs_and_weights_draw_what_they_say(tmp_path):
    sets = tokenized({"a": 30, "b": 20, "c": 10})
    mixture = {"a": {"weight": 1}, "b": {"weight": 3}, "c": {"epochs": 0.5}}
    trainer = trainer_of(tmp_path, sets, mixture=mixture)
    for epoch in range(3):
        trainer.args.num_train_epochs = 3
        assert drawn(trainer, epoch) == {"a": 12, "b": 38, "c": 5}


@pytest.mark.parametrize("unit", ["tokens", "trained_tokens"])
def test_shares_are_counted_in_tokens_where_asked(tmp_path, unit):
    rows = documents_of_lengths([40] * 30 + [10] * 30, prompt=8)
    sets = {"long": Dataset.from_list(rows[:30]), "short": Dataset.from_list(rows[30:])}
    mixture = {"long": {"weight": 1}, "short": {"weight": 1}}
    report = trainer_of(tmp_path, sets, mixture=mixture, mixture_unit=unit).packing_report
    long, short = report.sources
    of_unit = [s.tokens if unit == "tokens" else s.trained for s in (long, short)]
    assert of_unit[0] == pytest.approx(of_unit[1], rel=0.05)
    assert short.drawn > 2 * long.drawn


def test_a_temperature_draws_small_sources_more_often(tmp_path):
    sets = tokenized({"large": 48, "small": 3})
    assert drawn(trainer_of(tmp_path, sets, mixture_temperature=2.0)) == {"large": 41, "small": 10}
    assert drawn(trainer_of(tmp_path, sets, mixture_temperature=1.0)) == {"large": 48, "small": 3}


def test_the_column_of_a_single_set_names_its_sources(tmp_path):
    sets = tokenized({"a": 30, "b": 20})
    names = ["a"] * 30 + ["b"] * 20
    rows = Dataset.from_list([row for part in sets.values() for row in part])
    rows = rows.add_column("kind", names)
    mixture = {"a": {"epochs": 0.5}, "b": {"epochs": 2}}
    of_column = trainer_of(tmp_path, rows, mixture=mixture, source_column="kind")
    of_sets = trainer_of(tmp_path, sets, mixture=mixture)
    samplers = [
        t._sampling.for_training(documents_of(t.train_dataset, None)) for t in (of_column, of_sets)
    ]
    assert list(samplers[0]) == list(samplers[1])
    assert len(samplers[0].draw) == 55


def test_the_report_says_what_an_epoch_draws_of_each_source(tmp_path):
    sets = tokenized({"a": 30, "b": 20})
    trainer = trainer_of(tmp_path, sets, mixture={"b": {"epochs": 2}})
    report = trainer.packing_report
    tokens = [sum(LENGTHS[:30]), 2 * sum(LENGTHS[30:50])]
    assert report.documents == 70
    assert report.documents_in_data == 50
    assert report.tokens == sum(tokens)
    text = str(report)
    assert "70 drawn of 50" in text
    assert f"a: 1× 30 documents · {tokens[0]:,} tokens ({tokens[0] / sum(tokens):.1%})" in text
    assert f"b: 2× 20 documents · {tokens[1]:,} tokens" in text
    assert report.utilization == sum(tokens) / (report.bins * 64)


TWICE = {"a": {"epochs": 2}, "b": {"epochs": 1}}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mixture": {"c": {"weight": 1}}}, "names 'c', but the sources are a, b"),
        ({"mixture": {"a": {"epochs": 0}, "b": {"epochs": 0}}}, "draws no document"),
        ({"mixture": {"a": {"epochs": 1e300}}}, "of 'a', and 1,000,000,000 are the most"),
        ({"mixture": {"a": 2}}, r"mixture\['a'\]=2 must have"),
        ({"mixture": {"a": {"weight": -1}}}, "'weight' or 'epochs' from 0"),
        ({"mixture_temperature": 0}, "mixture_temperature=0 must be above 0"),
        ({"mixture_unit": "tokens"}, "mixture_unit='tokens' has no effect"),
        ({"mixture": {"a": {"weight": 1}}, "mixture_temperature": 2.0}, "weight of 'a'.*both"),
        ({"mixture": TWICE, "train_sampling_strategy": "sequential"}, "strategy='sequential'"),
        ({"mixture_temperature": 2.0, "prefix_sharing": "group"}, "prefix_sharing='group'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_one_sentence(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer_of(tmp_path, tokenized({"a": 8, "b": 8}), **options)


def test_a_mixture_without_sources_is_refused(tmp_path):
    rows = tokenized({"a": 8})["a"]
    with pytest.raises(ValueError, match="the training set has no column of them"):
        trainer_of(tmp_path, rows, mixture={"a": {"weight": 1}})
    with pytest.raises(ValueError, match="source_column='kind'"):
        trainer_of(tmp_path, rows, mixture={"a": {"weight": 1}}, source_column="kind")


# --- resuming, ranks ------------------------------------------------------------------------------

MODES = {
    "packed": {"batch_size": 2, "accumulation": 2},
    "padding-free": {"packing": False, "batch_size": 3, "accumulation": 2},
}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def assert_continues(resumed, uninterrupted):
    count = len(resumed["batches"])
    assert 0 < count < len(uninterrupted["batches"])
    assert resumed["batches"] == uninterrupted["batches"][-count:]
    for name, parameter in uninterrupted["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


@pytest.mark.parametrize("mode", fast([*MODES], ("packed",)))
def test_a_mixture_resumes_to_the_bit(mode, tmp_path):
    arguments = {
        "epochs": EPOCHS,
        "save_steps": 2,
        "sets": SETS,
        "options": {"mixture": MIXTURE},
        **MODES[mode],
    }
    whole = run(Scenario(str(tmp_path), LENGTHS, **arguments))
    found = checkpoints(tmp_path)
    checkpoint = str(found[len(found) // 2])
    assert_continues(run(Scenario(str(tmp_path), LENGTHS, resume=checkpoint, **arguments)), whole)


def tokens_trained(result) -> Counter:
    """Return how often each token is trained; a rank without documents runs a single masked one."""
    return Counter(token for batch in result["batches"] if len(batch) > 1 for token in batch)


LONGER = {
    "save_steps": 1,
    "sets": SETS,
    "options": {"mixture": {"math": {"epochs": 0.375}, "chat": {"epochs": 0.35}}},
    "accumulation": 3,
}


@pytest.mark.slow
def test_a_mixture_resumed_within_an_epoch_for_more_of_them_is_refused(tmp_path):
    """The fullest epoch decides about the bins of all, so an epoch's steps differ."""
    run(Scenario(str(tmp_path), LENGTHS, epochs=2, **LONGER))
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = Scenario(str(tmp_path / "more"), LENGTHS, epochs=6, resume=checkpoint, **LONGER)
    assert "a mixture of another number of epochs" in run(resumed)["error"]


def test_another_mixture_does_not_continue_an_epoch(tmp_path):
    arguments = {"save_steps": 1, "sets": SETS, "accumulation": 2}
    run(Scenario(str(tmp_path), LENGTHS, options={"mixture": MIXTURE}, **arguments))
    other = {"mixture": MIXTURE | {"math": {"epochs": 0.5}}}
    checkpoint = str(checkpoints(tmp_path)[0])
    resumed = run(Scenario(str(tmp_path), LENGTHS, options=other, resume=checkpoint, **arguments))
    assert "mixture={'documents': {'chat': 30, 'math': 20}" in resumed["error"]
    assert "instead of {'documents': {'chat': 30, 'math': 16}" in resumed["error"]


@pytest.mark.slow
def test_two_ranks_train_the_mixture_of_one(tmp_path):
    options = {"mixture": MIXTURE}
    one = {"sets": SETS, "options": options, "epochs": 2, "accumulation": 2}
    alone = run(Scenario(str(tmp_path / "one"), LENGTHS, **one))
    two = Scenario(str(tmp_path / "two"), LENGTHS, **one | {"accumulation": 1})
    ranks = run_on_ranks({"two": two}, tmp_path)["two"]
    assert [rank["steps"] for rank in ranks] == [alone["steps"]] * 2
    together = sum((tokens_trained(rank) for rank in ranks), Counter())
    assert together == tokens_trained(alone)
    for name, parameter in alone["parameters"].items():
        torch.testing.assert_close(
            ranks[0]["parameters"][name], parameter, rtol=1e-4, atol=TWO_RUNS
        )


# --- streams --------------------------------------------------------------------------------------

STREAMED = {
    "stream": True,
    "sets": SETS,
    "options": {"mixture": {"math": {"weight": 3}, "chat": {"weight": 1}}},
    "batch_size": 2,
    "max_steps": 12,
    "epochs": 1,
}


def test_streams_are_drawn_by_their_weights(tmp_path):
    rows = documents_of_lengths([8] * 400)
    sets = {"math": rows[:300], "chat": rows[300:]}
    weights = {"math": {"weight": 1}, "chat": {"weight": 1}}
    streams = {name: Dataset.from_list(part).to_iterable_dataset(3) for name, part in sets.items()}
    trainer = trainer_of(tmp_path, streams, mixture=weights, max_steps=3)
    found = [tuple(document["input_ids"]) for document in trainer.train_dataset]
    of_math = {tuple(row["input_ids"]) for row in sets["math"]}
    share = np.mean([document in of_math for document in found])
    assert share == pytest.approx(0.5, abs=0.08)
    assert {*found} == {tuple(row["input_ids"]) for row in rows}, "no document is left out"


def test_streams_resume_to_the_bit(tmp_path):
    whole = run(Scenario(str(tmp_path), LENGTHS, save_steps=4, **STREAMED))
    checkpoint = str(checkpoints(tmp_path)[1])
    resumed = run(Scenario(str(tmp_path), LENGTHS, save_steps=4, resume=checkpoint, **STREAMED))
    assert_continues(resumed, whole)


def test_other_weights_do_not_continue_a_stream(tmp_path):
    run(Scenario(str(tmp_path), LENGTHS, save_steps=4, **STREAMED))
    other = {"mixture": {"math": {"weight": 1}, "chat": {"weight": 1}}}
    checkpoint = str(checkpoints(tmp_path)[1])
    resumed = run(
        Scenario(str(tmp_path), LENGTHS, resume=checkpoint, **STREAMED | {"options": other})
    )
    assert "saved with a stream of mixture=math 3, chat 1" in resumed["error"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixture": {"a": {"weight": 1}}},
        {"mixture": {"a": {"epochs": 1}, "b": {"weight": 1}}},
        {"mixture": {"a": {"weight": 0}, "b": {"weight": 0}}},
        {"mixture_temperature": 2.0},
    ],
)
def test_streams_without_weights_are_refused(tmp_path, options):
    streams = {
        name: rows.to_iterable_dataset() for name, rows in tokenized({"a": 8, "b": 8}).items()
    }
    with pytest.raises(ValueError, match=r"give each of them a weight in mixture \(a, b"):
        trainer_of(tmp_path, streams, max_steps=1, **options)


def test_a_stream_without_documents_is_refused_by_its_name(tmp_path):
    rows = documents_of_lengths([8] * 10 + [80] * 10)
    sets = {"short": rows[:10], "long": rows[10:]}
    streams = {name: Dataset.from_list(part).to_iterable_dataset() for name, part in sets.items()}
    weights = {"short": {"weight": 1}, "long": {"weight": 1}}
    with pytest.raises(ValueError, match=r"train_dataset\['long'\]: the stream has no documents"):
        trainer_of(tmp_path, streams, mixture=weights, max_steps=1, overflow="drop")


def test_a_single_stream_has_no_sources(tmp_path):
    stream = tokenized({"a": 8})["a"].to_iterable_dataset()
    with pytest.raises(ValueError, match="a mixture draws sources, which a stream tells only"):
        trainer_of(tmp_path, stream, max_steps=1, mixture={"a": {"weight": 1}})
