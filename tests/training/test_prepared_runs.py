"""A run on prepared data trains, evaluates and reports what a run on the rows does, to the bit."""

import pytest
import torch
from helpers.prepared import chats, settings
from helpers.tiny import tiny_dataset, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTTrainer, load_prepared
from trl_packing.tools.prepare import prepare_run
from trl_packing.tools.training_command import TrainerCall

STEPS = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2}


def trainer_for(folder, train, evaluated=None, tokenizer=None, **changes):
    args = settings(folder, per_device_train_batch_size=2, **(STEPS | changes))
    return PackedSFTTrainer(
        tiny_model("llama"),
        args,
        train_dataset=train,
        eval_dataset=evaluated,
        processing_class=tokenizer or tiny_tokenizer(chat=True),
    )


def trained(folder, train, evaluated=None, **changes):
    """Return everything that a run computes: logs, evaluation, weights and the report."""
    trainer = trainer_for(folder, train, evaluated, **changes)
    trainer.train()
    logs = trainer.state.log_history
    if evaluated is not None:
        logs = [*logs, trainer.evaluate()]
    kept = ("loss", "grad_norm", "num_tokens", "num_documents", "mean_token_accuracy")
    numbers = [
        {name: value for name, value in log.items() if name.removeprefix("eval_").startswith(kept)}
        for log in logs
    ]
    return numbers, trainer.model.state_dict(), str(trainer.packing_report)


def prepared(tmp_path, train, evaluated=None, **changes):
    args = settings(**changes)
    call = TrainerCall(
        tiny_model("llama"), args, train, tiny_tokenizer(chat=True), eval_dataset=evaluated
    )
    prepare_run(call, tmp_path / "out")
    sets = None if evaluated is None else load_prepared(tmp_path / "out", "eval")
    return load_prepared(tmp_path / "out"), sets


def assert_same_run(tmp_path, train, evaluated=None, **changes):
    documents, again = prepared(tmp_path, train, evaluated, **changes)
    first = trained(tmp_path / "rows", train, evaluated, **changes)
    second = trained(tmp_path / "prepared", documents, again, **changes)
    assert second[0] == first[0]
    assert any(log.get("loss", 0) > 0 for log in first[0])
    for name, weight in first[1].items():
        assert torch.equal(second[1][name], weight), name
    assert second[2] == first[2]
    fewer = trained(tmp_path / "fewer", documents.select(range(len(documents) - 4)), **changes)
    assert fewer[0] != first[0], "the control"


RUNS = {
    "packed": (chats(), None, {"train_on": "assistant"}),
    "padding-free, weights": (
        chats(weights=True),
        None,
        {"packing": False, "documents_per_step": 5, "max_length": 40},
    ),
    "every turn, groups": (
        chats(),
        None,
        {"train_on": "every_turn", "prefix_sharing": "group", "prefix_group_size": 2},
    ),
    "sources": (
        chats(sources=True),
        chats(9, sources=True),
        {"train_on": "last_assistant", "source_column": "source"},
    ),
    "curriculum": (
        chats().add_column("hard", [i % 7 for i in range(24)]),
        None,
        {"curriculum": "hard"},
    ),
}


@pytest.mark.parametrize(
    "run",
    [
        name if name in ("packed", "sources") else pytest.param(name, marks=pytest.mark.slow)
        for name in RUNS
    ],
)
def test_a_prepared_run_trains_what_the_rows_train(tmp_path, run):
    train, evaluated, changes = RUNS[run]
    assert_same_run(tmp_path, train, evaluated, **changes)


def test_rows_to_evaluate_beside_prepared_data_train_what_they_do_beside_rows(tmp_path):
    """TRL decides by the training set whether prompts count in the loss."""
    rows, evaluated = tiny_dataset("prompt_completion"), tiny_dataset("prompt_completion", 5)
    documents, _ = prepared(tmp_path, rows)
    run = [
        trainer_for(tmp_path / "run", train, evaluated, **changes)
        for train, changes in (
            (rows, {}),
            (documents, {}),
            (rows, {"completion_only_loss": False}),  # control
        )
    ]
    labels = [trainer.eval_dataset["labels"][:] for trainer in run]
    assert labels[1] == labels[0]
    assert labels[2] != labels[0]
    assert run[1].evaluate()["eval_loss"] == run[0].evaluate()["eval_loss"]


def test_a_curriculum_needs_the_column_that_was_prepared(tmp_path):
    documents, _ = prepared(tmp_path, chats())
    with pytest.raises(ValueError, match=r"out was prepared without this column; run `trl-packing"):
        trainer_for(tmp_path / "run", documents, curriculum="hard")
    trainer_for(tmp_path / "run", documents, curriculum="length")


@pytest.mark.slow
def test_a_mixture_of_prepared_sets_trains_what_their_rows_train(tmp_path):
    rows = {"chats": chats(), "pairs": tiny_dataset("prompt_completion")}
    documents = {name: prepared(tmp_path / name, each)[0] for name, each in rows.items()}
    changes = {"mixture": {"chats": {"weight": 2}, "pairs": {"weight": 1}}}
    first = trained(tmp_path / "rows", rows, **changes)
    second = trained(tmp_path / "prepared", documents, **changes)
    assert second[0] == first[0]
    assert second[2] == first[2]
    for name, weight in first[1].items():
        assert torch.equal(second[1][name], weight), name
    other = prepared(tmp_path / "other", rows["pairs"], max_length=32)[0]
    with pytest.raises(ValueError, match="max_length=32 there and 64 here"):
        trainer_for(tmp_path / "run", documents | {"pairs": other}, **changes)


def test_a_trainer_refuses_what_does_not_fit_before_it_trains(tmp_path):
    documents, _ = prepared(tmp_path, chats(), train_on="assistant")
    refusals = {
        "max_length=64 there and 32 here": {"train_on": "assistant", "max_length": 32},
        "skips the check that prepared data fit": {
            "train_on": "assistant",
            "dataset_kwargs": {"skip_prepare_dataset": True},
        },
        "the train dataset is prepared; leave it out": {"assistant_only_loss": True},
    }
    for said, changes in refusals.items():
        with pytest.raises(ValueError, match=said):
            trainer_for(tmp_path / "run", documents, **changes)
    with pytest.raises(ValueError, match="max_length=64 there and 48 here"):
        trainer_for(tmp_path / "run", chats(), documents, train_on="assistant", max_length=48)
    # Trained tokens of prepared data stay as they are, also of a source or an evaluation set.
    rows = chats()
    whole, _ = prepared(tmp_path / "whole", rows)
    marked = {"assistant_only_loss": True, "tokenizer": tiny_tokenizer(chat="generation")}
    for sets in (({"a": rows, "b": whole}, None), (rows, whole)):
        with pytest.raises(ValueError, match="assistant_only_loss=False there and True here"):
            trainer_for(tmp_path / "run", *sets, **marked)
    with pytest.raises(ValueError, match="holds documents for packed runs, but data_collator is"):
        PackedSFTTrainer(
            tiny_model("llama"),
            settings(tmp_path / "run", packing=False),
            lambda rows: rows,
            documents,
            processing_class=tiny_tokenizer(chat=True),
        )
