"""`loss_weighting` and `loss_weight`: every mode equals its definition, document by document."""

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset, concatenate_datasets
from harness import losses_of_tokens, make_trainer
from helpers.by_hand import LAYOUTS, assert_same_step, by_hand, one_step, unweighted, weighted
from helpers.tiny import tiny_dataset
from helpers.tiny import tiny_tokenizer as text_tokenizer

DOCUMENT_WEIGHTS = [1.0, 0.5, 3.0, 0.25, 2.0, 0.0, 1.5, 1.0]


def by_document(documents):
    """Return `documents` with `loss_weight`; prompts of unequal length are not trained."""
    return [
        d
        | {
            "loss_weight": weight,
            "labels": [-100 if i < number % 4 else label for i, label in enumerate(d["labels"])],
        }
        for number, (d, weight) in enumerate(zip(documents, DOCUMENT_WEIGHTS, strict=False))
    ]


# --- the weights of a document --------------------------------------------------------------------


def dataset_of(*weights):
    return Dataset.from_list([{"input_ids": [7, 8, 9], "loss_weight": w} for w in weights])


def test_weights_are_read_through_select_and_chunks(tmp_path):
    dataset = concatenate_datasets([dataset_of(1, -1), dataset_of(3, 4)])
    trainer = make_trainer(
        tmp_path, dataset.select([3, 0, 2]), train_sampling_strategy="sequential"
    )
    assert trainer.train_dataset["loss_weight"][:] == [4.0, 1.0, 3.0], "wrong ones left out"
    weights = next(iter(trainer.get_train_dataloader()))["loss_weights"]
    assert (weights.dtype, {*weights.flatten().tolist()} - {0.0}) == (
        torch.float32,
        {4.0, 1.0, 3.0},
    )
    with pytest.raises(ValueError, match="row 1 of the train dataset has loss_weight=-1"):
        make_trainer(tmp_path, dataset)


# --- a step; its ways and options are rows of tests/test_oracle.py --------------------------------


def test_document_weighting_is_the_mean_of_the_means_of_documents(tmp_path):
    """LongAlign's, written without any weight."""
    model = tiny_model("llama")
    documents = unweighted(by_document(tiny_documents()))
    means = []
    for document in documents:
        ids, labels = (torch.tensor(document[key]) for key in ("input_ids", "labels"))
        logits = model(input_ids=ids[None]).logits[0]
        trained = labels[1:] != -100
        means.append(losses_of_tokens(logits[:-1][trained], labels[1:][trained], "nll").mean())
    loss = torch.stack(means).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    layout = LAYOUTS["three of 3, 3 and 2 documents"]
    model.zero_grad(set_to_none=True)
    found = one_step(model, documents, tmp_path, **layout, loss_weighting="document")
    assert_same_step(found, (loss.item(), gradients))
    by_tokens = one_step(model, documents, tmp_path, **layout)
    with pytest.raises(AssertionError):
        assert_same_step(by_tokens, (loss.item(), gradients))


def test_a_piece_of_a_split_document_is_a_document(tmp_path):
    model = tiny_model("llama")
    documents = by_document(weighted(tiny_documents((50, 20, 11))))
    pieces = [
        d | {k: d[k][i : i + 30] for k in ("input_ids", "labels", "loss_weights")}
        for d in documents
        for i in range(0, len(d["input_ids"]), 30)
    ]
    assert len(pieces) == 4
    found = one_step(
        model, documents, tmp_path, max_length=30, overflow="split", loss_weighting="document"
    )
    assert_same_step(found, by_hand(model, pieces, "nll", "document"))


def test_packed_rows_are_weighted(tmp_path):
    model = tiny_model("llama")
    documents = weighted(tiny_documents((20, 9, 14)))
    row = {key: [x for d in documents for x in d[key]] for key in documents[0]}
    rows = [row | {"seq_lengths": [20, 9, 14], "loss_weight": 2.0}]
    found = one_step(model, rows, tmp_path, loss_weighting="sqrt")
    assert_same_step(found, by_hand(model, documents, "nll", "sqrt"))


# --- preparation keeps the column -----------------------------------------------------------------


def prepared(folder, dataset, **options):
    options = {"tokenizer": text_tokenizer(chat=True), "isolation_check": "off", **options}
    return make_trainer(folder, dataset, max_length=16, overflow="split", **options)


FORMS = [
    ("language_modeling", True),
    ("prompt_completion", False),
    ("conversational_language_modeling", True),
]


@pytest.mark.parametrize(("form", "packing"), FORMS)
def test_rows_of_text_keep_the_weights_of_their_documents(form, packing, tmp_path):
    rows = tiny_dataset(form, 8).add_column("loss_weight", DOCUMENT_WEIGHTS)
    trainer = prepared(tmp_path, rows, packing=packing)
    alone = [len(prepared(tmp_path, rows.select([i])).train_dataset) for i in range(8)]
    assert max(alone) > 1
    expected = np.repeat(DOCUMENT_WEIGHTS, alone).tolist()
    assert trainer.train_dataset["loss_weight"][:] == expected
    if form == "language_modeling":
        rows = [{"text": "So.", "loss_weight": weight} for weight in (1.0, 2.0, None)]
        with pytest.raises(ValueError, match="row 2 of the train dataset has loss_weight=None; "):
            prepared(tmp_path, rows)
