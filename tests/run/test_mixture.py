"""Data sets as sources: prepared each by its own form, drawn by shares, resumed to the bit."""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from harness import make_trainer
from helpers.distributed.train import Scenario, assert_continues, run
from helpers.runs import documents_of
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_tokenizer

from trl_packing import PackedSFTTrainer

LENGTHS = [3 + (i * 7) % 29 for i in range(60)]
SETS = {"math": 40, "chat": 20}
MIXTURE = {"math": {"epochs": 0.4}, "chat": {"epochs": 1.5}}
EVEN = {"a": {"weight": 1}, "b": {"weight": 1}}


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


def streams(sets):
    return {k: Dataset.from_list(list(rows)).to_iterable_dataset(3) for k, rows in sets.items()}


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


def test_columns_of_sources_are_widened(tmp_path):
    sets = tokenized({"a": 4}, loss_weight=1) | tokenized({"b": 4}, loss_weight=0.5)
    sets |= {"c": tiny_dataset("language_modeling", 6)}  # the others are tokenized already
    trainer = trainer_of(tmp_path, sets)
    assert trainer.train_dataset["loss_weight"][:8] == [1.0] * 4 + [0.5] * 4
    assert len(trainer.train_dataset) == 14


# --- shares ---------------------------------------------------------------------------------------


def test_epochs_and_weights_draw_what_they_say(tmp_path):
    sets = tokenized({"a": 30, "b": 20, "c": 10})
    mixture = {"a": {"weight": 1}, "b": {"weight": 3}, "c": {"epochs": 0.5}}
    trainer = trainer_of(tmp_path, sets, mixture=mixture)
    assert drawn(trainer) == drawn(trainer, epoch=2) == {"a": 12, "b": 38, "c": 5}


@pytest.mark.parametrize("unit", ["tokens", "trained_tokens"])
def test_shares_are_counted_in_tokens_where_asked(tmp_path, unit):
    rows = documents_of_lengths([40] * 30 + [10] * 30, prompt=8)
    sets = {"long": Dataset.from_list(rows[:30]), "short": Dataset.from_list(rows[30:])}
    mixture = {name: {"weight": 1} for name in sets}
    report = trainer_of(tmp_path, sets, mixture=mixture, mixture_unit=unit).packing_report
    long, short = report.sources
    of_unit = [s.tokens if unit == "tokens" else s.trained for s in (long, short)]
    assert of_unit[0] == pytest.approx(of_unit[1], rel=0.05)
    assert short.drawn > 2 * long.drawn


def test_the_column_of_a_single_set_names_its_sources(tmp_path):
    sets = tokenized({"a": 30, "b": 20})
    rows = Dataset.from_list([row for part in sets.values() for row in part])
    rows = rows.add_column("kind", ["a"] * 30 + ["b"] * 20)
    mixture = {"a": {"epochs": 0.5}, "b": {"epochs": 2}}
    of_column, of_sets = (
        list(trainer_of(tmp_path, data, mixture=mixture, **o).get_train_dataloader().batch_sampler)
        for data, o in ((rows, {"source_column": "kind"}), (sets, {}))
    )
    assert of_column == of_sets
    assert sum(map(len, of_column)) == 55


def test_the_report_says_what_an_epoch_draws_of_each_source(tmp_path):
    sets = tokenized({"a": 30, "b": 20})
    trainer = trainer_of(tmp_path, sets, mixture={"b": {"epochs": 2}})
    report = trainer.packing_report
    tokens = [sum(LENGTHS[:30]), 2 * sum(LENGTHS[30:50])]
    assert (report.documents, report.tokens) == (70, sum(tokens))
    text = str(report)
    assert "70 drawn of 50" in text
    assert f"a: 1× 30 documents · {tokens[0]:,} tokens ({tokens[0] / sum(tokens):.1%})" in text
    assert f"b: 2× 20 documents · {tokens[1]:,} tokens" in text
    assert report.utilization == sum(tokens) / (report.bins * 64)


REFUSED = [
    ({"mixture": {"c": {"weight": 1}}}, "names 'c', but the sources .* are a, b"),
    ({"mixture": {"a": {"epochs": 0}, "b": {"epochs": 0}}}, "draws no document"),
]
NO_WEIGHT = r"give each of them a weight in mixture \(a, b"
# What is made of the sets, the settings, and the sentence.
REFUSED_SETS = [
    (lambda sets: DatasetDict(train=sets["a"]), {}, "of splits, pass one"),
    (lambda sets: {"a": sets["a"], "b": [1]}, {}, "a dictionary of one kind"),
    (lambda sets: sets | streams({"b": sets["b"]}), {}, "a dictionary of one kind"),
    (lambda sets: sets | {"b": sets["b"].select([])}, {}, "the train dataset is empty"),
    (
        lambda sets: sets | {"b": Dataset.from_list([{"input_ids": [1], "labels": [-100]}])},
        {},
        "of the 'b' dataset has a trained token",
    ),
    (lambda sets: sets["a"], {"mixture": EVEN}, "the training set has no column of them"),
    (lambda sets: streams(sets)["a"], {"mixture": EVEN}, "which a stream tells only"),
    (streams, {}, NO_WEIGHT),
    (streams, {"mixture": {"a": {"epochs": 1}, "b": {"weight": 1}}}, NO_WEIGHT),
    (streams, {"mixture": EVEN, "mixture_unit": "tokens"}, NO_WEIGHT),
    (
        lambda sets: streams(sets | {"b": documents_of_lengths([80] * 10)}),
        {"mixture": EVEN, "overflow": "drop"},
        r"train_dataset\['b'\]: the stream has no documents",
    ),
]


@pytest.mark.parametrize(
    ("made", "options", "sentence"), [*((dict, *row) for row in REFUSED), *REFUSED_SETS]
)
def test_sources_that_cannot_be_mixed_are_refused_in_a_sentence(tmp_path, made, options, sentence):
    sets = tokenized({"a": 8, "b": 8})
    with pytest.raises((TypeError, ValueError), match=sentence):
        trainer_of(tmp_path, made(sets), max_steps=1, **options)


# --- resuming, ranks ------------------------------------------------------------------------------

DRAWN = {"sets": SETS, "options": {"mixture": MIXTURE}, "epochs": 3}
STREAMED = {
    "stream": True,
    "sets": SETS,
    "options": {"mixture": {"math": {"weight": 3}, "chat": {"weight": 1}}},
    "batch_size": 2,
    "max_steps": 12,
}
RESUMED = {"packed": DRAWN | {"batch_size": 2, "accumulation": 2}, "streams": STREAMED}


def scenario(folder, **arguments) -> Scenario:
    return Scenario(str(folder), LENGTHS, save_steps=1, **arguments)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_mixture_resumes_to_the_bit(kind, tmp_path):
    whole = run(scenario(tmp_path, **RESUMED[kind]))
    checkpoint = str(tmp_path / f"checkpoint-{whole['steps'] // 2}")
    assert_continues(run(scenario(tmp_path, resume=checkpoint, **RESUMED[kind])), whole)


SAVED = {
    "sets": SETS,
    "options": {"mixture": {"math": {"epochs": 0.375}, "chat": {"epochs": 0.35}}},
    "accumulation": 3,
}
# Settings, what a resumed run changes of them, and how that is refused.
OTHERWISE = {
    "a mixture": (
        SAVED,
        {"options": {"mixture": MIXTURE}},
        "'math': 16}.* instead of .*'math': 15}",
    ),
    "weights of streams": (
        STREAMED,
        {"options": {"mixture": {"math": {"weight": 1}, "chat": {"weight": 1}}}},
        "saved with a stream of mixture=.*3",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_setting_does_not_continue_an_epoch(name, tmp_path):
    arguments, change, sentence = OTHERWISE[name]
    run(scenario(tmp_path, **arguments))
    resume = str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=sentence):
        run(scenario(tmp_path / "more", resume=resume, **arguments | change))


def test_streams_are_drawn_by_their_weights(tmp_path):
    rows = documents_of_lengths([8] * 400)
    sets = {"a": rows[:300], "b": rows[300:]}
    trainer = trainer_of(tmp_path, streams(sets), mixture=EVEN, max_steps=3)
    found = [tuple(document["input_ids"]) for document in trainer.train_dataset]
    of_a = {tuple(row["input_ids"]) for row in sets["a"]}
    assert np.mean([document in of_a for document in found]) == pytest.approx(0.5, abs=0.08)
    assert {*found} == {tuple(row["input_ids"]) for row in rows}, "no document is left out"
