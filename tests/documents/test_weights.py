"""`loss_weighting` and `loss_weight`: every mode equals its definition, document by document."""

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import TWO_RUNS
from helpers.by_hand import (
    LAYOUTS,
    LEARNING_RATE,
    TOLERANCE,
    assert_is_one_step_of,
    assert_same_step,
    by_hand,
    losses_of_tokens,
    one_step,
    trainer_for,
    unweighted,
    weighted,
)
from helpers.combinations import combined
from helpers.distributed.train import Scenario, run, run_on_ranks, token_weights
from helpers.tiny import documents_of_lengths, tiny_dataset
from helpers.tiny import tiny_model as small_model
from helpers.tiny import tiny_tokenizer as text_tokenizer

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.documents.weights import document_weight, weigh_tokens
from trl_packing.packing.batch_weights import WeightedPaddedCollator

MODES = ("document", "sqrt")
DOCUMENT_WEIGHTS = [1.0, 0.5, 3.0, 0.25, 2.0, 0.0, 1.5, 1.0]


def by_document(documents):
    """Return `documents` with `loss_weight`; prompts of unequal length are not trained."""
    return [
        d
        | {
            "loss_weight": weight,
            "labels": [
                IGNORE_INDEX if i < number % 4 else label for i, label in enumerate(d["labels"])
            ],
        }
        for number, (d, weight) in enumerate(zip(documents, DOCUMENT_WEIGHTS, strict=False))
    ]


# --- the weights of a document --------------------------------------------------------------------


def weights_by_hand(own, labels, loss_weight, mode):
    """Return the weights of one document, token by token."""
    trained = [
        w if t > 0 and label != -100 else 0.0
        for t, (w, label) in enumerate(zip(own, labels, strict=True))
    ]
    n = sum(trained)
    divisor = {"token": 1, "document": n, "sqrt": n**0.5}[mode]
    return [loss_weight * w / divisor if w else 0.0 for w in trained]


@pytest.mark.parametrize("mode", ["token", *MODES])
def test_weights_are_those_of_each_document_computed_alone(mode):
    rng = np.random.default_rng(0)
    lengths, factors = [5, 1, 7, 3, 4], [1.0, 2.0, 0.5, 0.0, 3.0]
    labels = [np.where(rng.random(n) < 0.4, -100, 7) for n in lengths]
    labels[3][:] = -100
    own = [rng.integers(0, 5, n) / 4 for n in lengths]
    expected = [
        w
        for o, row, factor in zip(own, labels, factors, strict=True)
        for w in weights_by_hand(o, row, factor, mode)
    ]
    flat = np.concatenate(labels)
    flat[np.cumsum([0, *lengths[:-1]])] = -100
    found = weigh_tokens(np.concatenate(own), flat, lengths, factors, mode)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=TWO_RUNS)


@pytest.mark.parametrize("mode", MODES)
def test_packed_and_padded_batches_have_the_same_weights(mode):
    documents = by_document(weighted(tiny_documents((9, 3, 12))))
    flat = PackedCollator(loss_weighting=mode)(documents)["loss_weights"][0]
    rows = WeightedPaddedCollator(_pad, mode)(documents)["loss_weights"]
    for row, document in zip(rows, flat.split([9, 3, 12]), strict=True):
        torch.testing.assert_close(row[: len(document)], document, rtol=0, atol=0)
        assert row[len(document) :].sum() == 0


def _pad(documents):
    labels = [torch.tensor(d["labels"]) for d in documents]
    return {"labels": torch.nn.utils.rnn.pad_sequence(labels, True, IGNORE_INDEX)}


def test_documents_in_a_packed_row_are_weighted_one_by_one():
    documents = weighted(tiny_documents((5, 8)))
    row = {k: documents[0][k] + documents[1][k] for k in documents[0]} | {"seq_lengths": [5, 8]}
    collate = PackedCollator(loss_weighting="document")
    assert torch.equal(collate([row])["loss_weights"], collate(documents)["loss_weights"])
    twice = collate([row | {"loss_weight": 2.0}])["loss_weights"]
    assert torch.equal(twice, 2 * collate([row])["loss_weights"])


def test_padding_and_empty_micro_batches_weigh_nothing():
    collate = PackedCollator(pad_to_multiple_of=8, loss_weighting="document")
    assert collate([])["loss_weights"].tolist() == [[0.0] * 8]
    weights = collate([{"input_ids": [5, 6, 7]}])["loss_weights"]
    assert weights.tolist() == [[0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_without_settings_and_columns_a_batch_has_no_weights():
    assert "loss_weights" not in PackedCollator()([{"input_ids": [5, 6]}])
    assert "loss_weights" not in WeightedPaddedCollator(_pad)([{"input_ids": [5], "labels": [5]}])


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "many", [1.0, 2.0], 1e300])
def test_an_impossible_weight_of_a_document_is_named(wrong):
    with pytest.raises(ValueError, match=r"a document has loss_weight=.*(give finite|divide all)"):
        document_weight({"loss_weight": wrong})


# --- a step; its ways and options are rows of tests/test_oracle.py --------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_document_weighting_is_the_mean_of_the_means_of_documents(layout, tmp_path):
    """LongAlign's, written without any weight."""
    model, documents = tiny_model("llama"), unweighted(by_document(tiny_documents()))
    means = []
    for document in documents:
        ids, labels = (torch.tensor(document[key]) for key in ("input_ids", "labels"))
        logits = model(input_ids=ids[None]).logits[0]
        trained = labels[1:] != IGNORE_INDEX
        means.append(losses_of_tokens(logits[:-1][trained], labels[1:][trained], "nll").mean())
    loss = torch.stack(means).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    options = {**LAYOUTS[layout], "loss_weighting": "document"}
    model.zero_grad(set_to_none=True)
    assert_same_step(one_step(model, documents, tmp_path, **options), (loss.item(), gradients))
    by_tokens = one_step(model, documents, tmp_path, **LAYOUTS[layout])
    with pytest.raises(AssertionError):
        assert_same_step(by_tokens, (loss.item(), gradients))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weight_of_a_document_alone_counts(layout, tmp_path):
    model, documents = tiny_model("llama"), by_document(tiny_documents())
    expected = by_hand(model, documents)
    assert_same_step(one_step(model, documents, tmp_path, **LAYOUTS[layout]), expected)
    with pytest.raises(AssertionError):
        assert_same_step(by_hand(model, unweighted(documents)), expected)


@pytest.mark.parametrize("layout", ["one micro-batch", "three of a bin"])
def test_document_weights_of_one_change_no_bit(layout, tmp_path):
    model, documents = tiny_model("llama"), tiny_documents()
    ones = [d | {"loss_weight": 1} for d in documents]
    found, expected = (one_step(model, d, tmp_path, **LAYOUTS[layout]) for d in (ones, documents))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], g) for name, g in expected[1].items())


@pytest.mark.parametrize("mode", MODES)
def test_the_logged_gradient_norm_is_that_of_the_weighted_loss(mode, tmp_path):
    model, documents = tiny_model("llama"), by_document(tiny_documents())
    options = LAYOUTS["three of a bin"] | {"loss_weighting": mode, "max_grad_norm": 1e9}
    trainer = trainer_for(model, documents, tmp_path, **options)
    trainer.train()
    loss, gradients = by_hand(model, documents, "nll", mode)
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert logged["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def test_a_piece_of_a_split_document_is_a_document(tmp_path):
    model, documents = tiny_model("llama"), by_document(weighted(tiny_documents((50, 20, 11))))
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


@pytest.mark.parametrize("mode", ["token", *MODES])
def test_packed_rows_are_weighted(mode, tmp_path):
    model, documents = tiny_model("llama"), weighted(tiny_documents((20, 9, 14)))
    row = {key: [x for d in documents for x in d[key]] for key in documents[0]}
    rows = [row | {"seq_lengths": [20, 9, 14], "loss_weight": 2.0}]
    found = one_step(model, rows, tmp_path, loss_weighting=mode)
    assert_same_step(found, by_hand(model, documents, "nll", mode))


@pytest.mark.parametrize(("packing", "skips"), combined([True, False], [True, False]))
def test_a_stream_is_weighted(packing, skips, tmp_path):
    model, documents = tiny_model("llama"), by_document(weighted(tiny_documents()))
    stream = Dataset.from_list(documents).to_iterable_dataset()
    options = {"packing": packing, "per_device_train_batch_size": 2, "loss_weighting": "sqrt"}
    if skips:
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    found = one_step(model, stream, tmp_path, gradient_accumulation_steps=4, **options)
    assert_same_step(found, by_hand(model, documents, "nll", "sqrt"))


# --- two ranks ------------------------------------------------------------------------------------

LENGTHS = [32, 5, 30, 9, 17, 23, 3, 28]
RANKS = {
    f"{mode}, {name}": {**arguments, "mode": mode}
    for mode in MODES
    for name, arguments in {
        "packed": {},
        "not packed": {"packing": False, "batch_size": 4},
        "accumulated": {"packing": False, "batch_size": 2, "accumulation": 2},
    }.items()
}
# Three bins of one document: rank 1 has none in the second step.
EMPTY = {"lengths": [32, 32, 32], "batch_size": 1, "max_steps": 2, "mode": "document"}


def scenario(name, folder, times=1):
    arguments = dict(EMPTY if name == "empty" else RANKS[name])
    options = {"optim": "sgd", "learning_rate": LEARNING_RATE, "max_grad_norm": 1e9}
    options["loss_weighting"] = arguments.pop("mode")
    return Scenario(
        str(folder / name),
        **{"lengths": LENGTHS, "batch_size": 3, "max_steps": 1, **arguments}
        | {"accumulation": times * arguments.get("accumulation", 1)},
        weighted=True,
        document_weights=DOCUMENT_WEIGHTS,
        options=options,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    scenarios = {name: scenario(name, base) for name in (*RANKS, "empty")}
    return run_on_ranks(scenarios, base / "results")


def documents_of(lengths, seed=0):
    rows = documents_of_lengths(lengths, prompt=2, seed=seed)
    return [
        row | {"loss_weights": token_weights(row["input_ids"]), "loss_weight": weight}
        for row, weight in zip(rows, DOCUMENT_WEIGHTS, strict=False)
    ]


def assert_is_one_logged_step_of(result, expected):
    norm = sum(float(g.square().sum()) for g in expected[1].values()) ** 0.5
    assert result["grad_norms"] == pytest.approx([norm], rel=TOLERANCE)
    assert_is_one_step_of(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_weigh_documents_as_one(name, two_ranks):
    model, documents = small_model("llama"), documents_of(LENGTHS)
    expected = by_hand(model, documents, "nll", RANKS[name]["mode"])
    for result in two_ranks[name]:
        assert_is_one_logged_step_of(result, expected)
    with pytest.raises(AssertionError):
        assert_is_one_logged_step_of(two_ranks[name][0], by_hand(model, documents))


@pytest.mark.slow
def test_a_rank_without_documents_left_takes_part(two_ranks, tmp_path):
    alone = run(scenario("empty", tmp_path, 2))
    for result in two_ranks["empty"]:
        assert len(result["losses"]) == 2
        for key in ("losses", "parameters"):
            torch.testing.assert_close(result[key], alone[key], rtol=0, atol=TWO_RUNS)


# --- preparation keeps the column -----------------------------------------------------------------


def prepared(folder, dataset, **options):
    arguments = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    options = {"max_length": 64, "isolation_check": "off", **options}
    return PackedSFTTrainer(
        small_model("llama"),
        PackedSFTConfig(**arguments, **options),
        train_dataset=dataset,
        processing_class=text_tokenizer(chat=True),
    )


@pytest.mark.parametrize(
    ("form", "packing"),
    combined(
        ["language_modeling", "prompt_completion", "conversational_language_modeling"],
        [True, False],
    ),
)
def test_rows_of_text_keep_the_weights_of_their_documents(form, packing, tmp_path):
    rows = tiny_dataset(form, 8)
    rows = rows.add_column("loss_weight", DOCUMENT_WEIGHTS)
    trainer = prepared(tmp_path, rows, packing=packing, max_length=16, overflow="split")
    alone = [
        len(prepared(tmp_path, rows.select([i]), max_length=16, overflow="split").train_dataset)
        for i in range(8)
    ]
    assert max(alone) > 1
    expected = np.repeat(DOCUMENT_WEIGHTS, alone).tolist()
    assert trainer.train_dataset["loss_weight"][:] == expected


def test_a_stream_of_text_keeps_the_weights_of_its_documents(tmp_path):
    rows = tiny_dataset("prompt_completion", 8).add_column("loss_weight", DOCUMENT_WEIGHTS)
    trainer = prepared(tmp_path, rows.to_iterable_dataset(), max_steps=1, max_length=128)
    assert [row["loss_weight"] for row in trainer.train_dataset] == DOCUMENT_WEIGHTS


@pytest.mark.parametrize("stream", [False, True])
def test_appending_eos_and_templates_keep_the_weights(stream, tmp_path):
    tokenizer = text_tokenizer(chat=True)
    rows = [{"input_ids": tokenizer("Why?\n### A: So.")["input_ids"], "loss_weight": 0.5}] * 4
    dataset = Dataset.from_list(rows)
    trainer = prepared(
        tmp_path,
        dataset.to_iterable_dataset() if stream else dataset,
        append_eos=True,
        response_template="### A:",
        max_steps=1,
    )
    found = list(trainer.train_dataset)
    assert [row["loss_weight"] for row in found] == [0.5] * 4
    assert found[0]["input_ids"][-1] == tokenizer.eos_token_id


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), None])
def test_a_row_with_an_impossible_weight_is_named(wrong, tmp_path):
    rows = [{"text": "So."}, {"text": "Well."}, {"text": "Why?"}]
    rows = [
        row | {"loss_weight": weight} for row, weight in zip(rows, (1.0, 2.0, wrong), strict=True)
    ]
    with pytest.raises(ValueError, match=rf"row 2 of the train dataset has loss_weight={wrong}; "):
        prepared(tmp_path, Dataset.from_list(rows))


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'loss_weight' of the train dataset holds string"):
        prepared(tmp_path, Dataset.from_list([{"text": "So.", "loss_weight": "much"}]))


def test_an_unknown_weighting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="loss_weighting='tokens' is unknown; choose one of"):
        PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False, loss_weighting="tokens")


def own_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.sum()


@pytest.mark.parametrize(
    ("option", "way_out"),
    [("loss_weighting", "loss_weighting='token'"), ("source_column", "source_column out")],
)
def test_a_loss_function_of_ones_own_takes_no_weights_and_no_sources(option, way_out, tmp_path):
    options = {option: "document", "arguments": {"compute_loss_func": own_loss}}
    with pytest.raises(ValueError, match=rf"{option}='document' .*compute_loss_func .*{way_out}"):
        trainer_for(tiny_model("llama"), tiny_documents(), tmp_path, **options)


def test_a_loss_function_of_ones_own_takes_no_document_weights(tmp_path):
    arguments = {"compute_loss_func": own_loss}
    documents = by_document(tiny_documents())
    with pytest.raises(ValueError, match=r"loss_weight says .*remove_columns\('loss_weight'\)"):
        trainer_for(tiny_model("llama"), documents, tmp_path, arguments=arguments)


def test_the_path_of_trl_weighs_no_documents(tmp_path):
    arguments = {"data_collator": lambda rows: rows}
    with pytest.raises(ValueError, match=r"loss_weighting='sqrt' .*data_collator is your own"):
        trainer_for(
            tiny_model("llama"),
            tiny_documents(),
            tmp_path,
            arguments=arguments,
            loss_weighting="sqrt",
        )


def test_a_collator_weighs_as_the_config_says(tmp_path):
    model, documents = tiny_model("llama"), tiny_documents()
    arguments = {"data_collator": PackedCollator()}
    trainer = trainer_for(model, documents, tmp_path, arguments=arguments, loss_weighting="sqrt")
    assert trainer.data_collator.loss_weighting == "sqrt"
    arguments = {"data_collator": PackedCollator(loss_weighting="document")}
    with pytest.raises(ValueError, match="loss_weighting='document', but the config has 'token'"):
        trainer_for(model, documents, tmp_path, arguments=arguments)
