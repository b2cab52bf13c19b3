"""Dictionaries of data sets of which some have images: trained packed, exactly, as mixtures."""

from dataclasses import replace

import harness
import numpy as np
import pytest
from datasets import Dataset
from helpers.runs import TrainerCall, documents_of, preview_epoch, run_of_call
from helpers.tiny import documents_of_lengths
from helpers.vision import image_dataset, pack_no_images, texts
from vision.test_exact import batches_of, packed, sized

MIXTURE = {"texts": {"epochs": 2}, "chats": {"epochs": 1}}


def chats(rows: int = 4) -> Dataset:
    """Return conversations without images, of a question and its answer."""
    pairs = [(row["prompt"], row["completion"]) for row in texts(rows)]
    return Dataset.from_list([{"messages": [*prompt, *answer]} for prompt, answer in pairs])


def sets() -> dict[str, Dataset]:
    return {"texts": texts(), "pictures": image_dataset(), "chats": chats()}


def alone(model, processor, copies):
    """Return loss and gradients of rows of `sets()`, each as often as `copies` of its set says."""
    batches = []
    for name, dataset in sets().items():
        rows = [{"images": [], **row} for row in dataset] * copies[name]
        batches += batches_of(processor, rows, completion_only_loss=name != "chats")
    return harness.alone(model, batches, collate=dict)


#: All 8 + 2 × 6 + 4 documents are in one step.
STEPS = [(16, 1), pytest.param(2, 8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("size", "accumulated"), STEPS)
def test_a_mixture_equals_its_documents_alone(size, accumulated, model, processor, tmp_path):
    options = sized(size, accumulated, mixture=MIXTURE)
    found = packed(model, processor, sets(), tmp_path, **options)
    assert found.trainer._trl_path is None
    harness.assert_exact(found, alone(model, processor, {"texts": 2, "pictures": 1, "chats": 1}))
    others = alone(model, processor, {"texts": 1, "pictures": 1, "chats": 1})  # the control
    with pytest.raises(AssertionError):
        harness.assert_exact(found, others)


def test_sets_of_every_form_become_the_documents_that_they_are_alone(trainer_of):
    """Also texts that TRL's code prepares, and tokens; these have no columns of images."""
    lines = Dataset.from_dict({"prompt": ["What is this?"] * 3, "completion": ["It is a."] * 3})
    tokens = Dataset.from_list(documents_of_lengths([9, 4, 7]))
    given = {**sets(), "lines": lines, "tokens": tokens}
    found = documents_of(trainer_of(given).train_dataset, None)
    alone = (documents_of(trainer_of(rows).train_dataset, None) for rows in given.values())
    expected = [document for documents in alone for document in documents]
    assert len(found) == len(expected) == 24
    for one, other in zip(found, expected, strict=True):
        for column in ("input_ids", "labels"):
            assert one[column].tolist() == other[column].tolist()
        assert one["image_ids"].any() == other.get("image_ids", np.zeros(1)).any()


def test_answers_alone_are_trained_with_images_and_without(processor, trainer_of):
    given = {"pictures": image_dataset(form="messages"), "chats": chats()}
    trainer = trainer_of(given, train_on="assistant")
    answers = [row["messages"][-1]["content"] for rows in given.values() for row in rows]
    for document, answer in zip(trainer.train_dataset, answers, strict=True):
        words = answer if isinstance(answer, str) else answer[0]["text"]
        trained = [label for label in document["labels"] if label != -100]
        assert processor.tokenizer.decode(trained) == words + "<|im_end|>"


# --- refused --------------------------------------------------------------------------------------


def test_a_dictionary_that_only_trl_could_train_is_refused(trainer_of, monkeypatch):
    refusal = "only packed runs train a dictionary of data sets, but "
    with pytest.raises(ValueError, match=f"{refusal}packing_strategy='wrapped' cuts"):
        trainer_of(sets(), packing_strategy="wrapped")
    pack_no_images(monkeypatch)
    with pytest.raises(ValueError, match=f"{refusal}the data set has images"):
        trainer_of(sets())


# --- before a run ---------------------------------------------------------------------------------


def test_a_preview_prepares_the_documents_of_the_trainer(model, processor, trainer_of):
    trainer = trainer_of(sets(), mixture=MIXTURE)
    run = run_of_call(TrainerCall(model, trainer.args, sets(), processor))
    prepared, _ = run.documents()
    for column in ("input_ids", "labels", "image_ids"):
        assert prepared[column][:] == trainer.train_dataset[column][:]
    run = replace(run, dataset=run.images.take(run.dataset, "train"))
    epoch = preview_epoch(run)
    report = trainer.packing_report
    assert (epoch.sources, str(epoch.images)) == (report.sources, str(report.images))
    assert (epoch.bins, epoch.utilization) == (report.bins, report.utilization)
