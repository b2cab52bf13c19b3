"""A run on prepared data trains, evaluates and reports what a run on the rows does, to the bit."""

import pytest
from helpers.prepared import chats, settings
from helpers.runs import TrainerCall, prepare_run
from helpers.tiny import tiny_dataset, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTTrainer, load_prepared

STEPS = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2}
STEPS |= {"per_device_train_batch_size": 2}


def trainer_for(folder, train, evaluated=None, tokenizer=None, collator=None, **changes):
    args = settings(folder, **STEPS | changes)
    tokenizer = tokenizer or tiny_tokenizer(chat=True)
    return PackedSFTTrainer(tiny_model("llama"), args, collator, train, evaluated, tokenizer)


def prepared(folder, train, evaluated=None, **changes):
    args, tokenizer = settings(**changes), tiny_tokenizer(chat=True)
    call = TrainerCall(tiny_model("llama"), args, train, tokenizer, eval_dataset=evaluated)
    prepare_run(call, folder / "out")
    sets = None if evaluated is None else load_prepared(folder / "out", "eval")
    return load_prepared(folder / "out"), sets


def test_a_prepared_run_trains_what_the_rows_train(tmp_path):
    sets = (chats(weights=True), chats(9))
    changes = {"packing": False, "documents_per_step": 5}
    documents = prepared(tmp_path, *sets, **changes)
    losses = []
    fewer = documents[0].select(range(12)), documents[1]
    for train, evaluated in (sets, documents, fewer):
        trainer = trainer_for(tmp_path / "run", train, evaluated, **changes)
        trainer.train()
        logs = [*trainer.state.log_history, trainer.evaluate()]
        losses.append([{n: log[n] for n in log if n in ("loss", "eval_loss")} for log in logs])
    assert losses[0] == losses[1] != losses[2]


def test_a_mixture_of_prepared_sets_is_checked_set_by_set(tmp_path):
    sets = {"chats": chats(), "pairs": tiny_dataset("prompt_completion")}
    documents = {name: prepared(tmp_path / name, each)[0] for name, each in sets.items()}
    rows, made = (trainer_for(tmp_path / "run", each).train_dataset for each in (sets, documents))
    assert made["labels"][:] == rows["labels"][:]
    other = prepared(tmp_path / "other", sets["pairs"], max_length=32)[0]
    with pytest.raises(ValueError, match="max_length=32 there and 64 here"):
        trainer_for(tmp_path / "run", documents | {"pairs": other})


def test_rows_to_evaluate_beside_prepared_data_train_what_they_do_beside_rows(tmp_path):
    """TRL decides by the training set whether prompts count in the loss."""
    rows, evaluated = tiny_dataset("prompt_completion"), tiny_dataset("prompt_completion", 5)
    runs = (rows, {}), (prepared(tmp_path, rows)[0], {}), (rows, {"completion_only_loss": False})
    first, second, control = (
        trainer_for(tmp_path / "run", train, evaluated, **changes).eval_dataset["labels"][:]
        for train, changes in runs
    )
    assert second == first != control


def test_a_trainer_refuses_what_does_not_fit_before_it_trains(tmp_path):
    """Trained tokens of prepared data stay as they are, also of a source or an evaluation set."""
    rows = chats()
    assistant, _ = prepared(tmp_path, rows, train_on="assistant")
    whole, _ = prepared(tmp_path / "whole", rows)
    ours, skip = {"train_on": "assistant"}, {"skip_prepare_dataset": True}
    marked = {"assistant_only_loss": True, "tokenizer": tiny_tokenizer(chat="generation")}
    for said, sets, changes in (
        ("max_length=64 there and 48 here", (rows, assistant), {**ours, "max_length": 48}),
        ("skips append_eos", (assistant,), {**ours, "dataset_kwargs": skip}),
        ("not conversational", (assistant,), {"assistant_only_loss": True}),
        ("assistant_only_loss=False there and True", ({"a": rows, "b": whole},), marked),
        ("assistant_only_loss=False there and True", (rows, whole), marked),
        ("must name a column with a number", (whole,), {"curriculum": "hard"}),
        ("prepared for packed runs", (whole,), {"packing": False, "collator": list}),
    ):
        with pytest.raises(ValueError, match=said):
            trainer_for(tmp_path / "run", *sets, **changes)
    trainer_for(tmp_path / "run", whole, curriculum="length")
