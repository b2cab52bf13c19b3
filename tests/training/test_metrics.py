"""Every figure that is logged equals its definition in docs/metrics.md, counted from the batches.

Time is a counted clock: a second a micro-batch, a hundred an evaluation, a thousand a save.
"""

import itertools
from contextlib import nullcontext
from unittest.mock import patch

import pytest
from harness import make_trainer
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.tiny import documents_of_lengths, tiny_tokenizer
from helpers.waits import counted_waits

from trl_packing import PackedCollator, PackedSFTTrainer
from trl_packing.loss.sums import LossSums
from trl_packing.pages.record import FILE, RunRecord
from trl_packing.training.metrics import ThroughputMeter

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
PAD = 0  # no document holds it
CAPACITY = 32


def scenario(folder, **arguments):
    return Scenario(str(folder), **{"lengths": LENGTHS, "counted_clock": True, **arguments})


def counted(batch):
    """Return documents, tokens, trained tokens and the row's length of a recorded micro-batch."""
    ids, positions, labels = (
        batch[name].flatten() for name in ("input_ids", "position_ids", "labels")
    )
    real = ids != PAD
    documents = ((positions == 0) & real).sum()
    return int(documents), int(real.sum()), int((labels != -100).sum()), len(ids)


def counts_by_hand(ranks, steps):
    """Return the number of micro-batches of `steps` (from 0) of all ranks, and their counts."""
    rows = [
        counted(batch)
        for rank in ranks
        for step, batch in zip(rank["trained_in"], rank["inputs"], strict=True)
        if step in steps
    ]
    return len(rows), [sum(column) for column in zip((0, 0, 0, 0), *rows, strict=True)]


def by_hand(ranks, steps, room):
    """Return the metrics of `steps` from what every rank has trained."""
    number, (documents, tokens, trained, cells) = counts_by_hand(ranks, steps)
    seconds = number / len(ranks)
    return {
        "tokens_per_second": tokens / seconds,
        "trained_tokens_per_second": trained / seconds,
        "documents_per_second": documents / seconds,
        "utilization": tokens / (number * room if room else cells),
        "documents_per_step": documents / len(steps),
    }


def assert_logged(ranks, folder, *, room, every=1):
    """Hold each logged interval, the totals, and the record of the run to `by_hand`."""
    history, totals, num_steps = (ranks[0][name] for name in ("history", "totals", "steps"))
    logged = [entry for entry in history if "tokens_per_second" in entry]
    assert [entry["step"] for entry in logged] == list(range(every, num_steps + 1, every))
    for entry in logged:
        expected = by_hand(ranks, range(entry["step"] - every, entry["step"]), room)
        assert {name: entry[name] for name in expected} == pytest.approx(expected)
        assert entry["num_tokens"] == counts_by_hand(ranks, range(entry["step"]))[1][1]
    expected = by_hand(ranks, range(num_steps), room)
    assert {n: totals[f"train_{n}"] for n in expected} == pytest.approx(expected)
    record = RunRecord.load(folder / FILE)
    assert (record.log, record.step, record.facts["ranks"]) == (history, num_steps, str(len(ranks)))
    for entry in record.log:
        number, counts = counts_by_hand(ranks, range(entry["step"]))
        assert record.totals[entry["step"]] == (*counts, number / len(ranks))
    names = ("documents", "tokens", "trained_tokens", "seconds")
    assert [totals[f"train_{n}"] for n in names] == [getattr(record.total, n) for n in names]
    samples = totals["train_samples_per_second"] * totals["train_runtime"]
    assert samples == pytest.approx(totals["train_documents"], rel=0.01)  # both are rounded
    assert history[-1].items() >= totals.items()


# --- one rank -------------------------------------------------------------------------------------

PAUSED = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
RUNS = {
    "two bins": (
        {"batch_size": 2, "accumulation": 2, "epochs": 2, "options": {"logging_steps": 3}},
        2 * CAPACITY,
    ),
    "stream": ({"stream": True, "max_steps": 5}, CAPACITY),
    "padding-free, pad_to_multiple_of": (
        {"packing": False, "batch_size": 3, "options": {"pad_to_multiple_of": 16}},
        None,
    ),
    "evaluations and saves": (
        {"eval_lengths": LENGTHS, "save_steps": 2, "max_steps": 5, "options": PAUSED},
        CAPACITY,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_logged_is_what_was_trained(name, tmp_path):
    arguments, room = RUNS[name]
    result = run(scenario(tmp_path, **arguments))
    every = arguments.get("options", {}).get("logging_steps", 1)
    assert_logged([result], tmp_path, room=room, every=every)
    if "pad_to" in name:  # the control: with the padding it is another number
        padded = sum(len(batch) for batch in result["batches"])
        assert padded > result["totals"]["train_tokens"]
    if "evaluations" in name:  # before training, at the start, after 2 and after 4 steps
        assert sum("eval_loss" in entry for entry in result["history"]) == 4


def test_a_clock_that_never_stops_gives_another_number(tmp_path):
    """The control: saves would count as training."""
    with patch.object(ThroughputMeter, "pause", lambda self: nullcontext()):
        slow = run(scenario(tmp_path, max_steps=2, save_steps=1))
    assert slow["totals"]["train_seconds"] > 1000


def test_num_tokens_are_those_of_training_also_at_an_evaluation(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "pad_to_multiple_of": 16}
    result = run(scenario(tmp_path, eval_lengths=LENGTHS, max_steps=3, options=options))
    seen = [entry["eval_num_tokens"] for entry in result["history"] if "eval_num_tokens" in entry]
    assert seen == [*itertools.accumulate(counted(batch)[1] for batch in result["inputs"])]


def trainer_of(folder, rows=None, **options):
    settings = {"max_length": CAPACITY, "per_device_train_batch_size": 1, "logging_steps": 1}
    settings |= {"num_train_epochs": 1, "isolation_check": "off"}
    return make_trainer(folder, rows or documents_of_lengths(LENGTHS), **settings | options)


def test_transformers_own_count_is_of_documents_also_where_eos_is_the_padding(tmp_path):
    rows = documents_of_lengths(LENGTHS)
    for row in rows:
        row["input_ids"][-1] = row["labels"][-1] = tiny_tokenizer().eos_token_id
    options = {"include_num_input_tokens_seen": "non_padding", "pad_to_multiple_of": 16}
    trainer = trainer_of(tmp_path, rows, tokenizer=tiny_tokenizer(pad="<eos>"), **options)
    assert trainer.train().metrics["train_tokens"] == sum(LENGTHS)
    assert trainer.state.num_input_tokens_seen == sum(LENGTHS)


def test_a_collator_that_says_nothing_of_its_rows_logs_nothing(tmp_path):
    class Own(PackedCollator):
        def __call__(self, documents):
            return super().__call__(documents)

    trainer = trainer_of(tmp_path, collator=Own())
    trainer.train()
    unknown = {"utilization", "train_utilization", "train_tokens", "train_trained_tokens"}
    assert not any(unknown & entry.keys() for entry in trainer.state.log_history)
    assert trainer.state.log_history[-1]["train_samples_per_second"] > 0, "that of transformers"
    counted = [e["num_tokens"] for e in trainer.state.log_history if "num_tokens" in e]
    assert counted[-1] == sum(LENGTHS), "TRL's count, and not 0"
    assert counted == sorted(set(counted))


def test_a_shared_prefix_counts_for_each_document_and_is_computed_once(tmp_path):
    prompt = list(range(6, 36))
    rows = [{"input_ids": [*prompt, *range(40, 40 + 2 * n)]} for n in range(1, 10)]
    rows += documents_of_lengths(LENGTHS)
    computed = []

    class Sees(PackedSFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            computed.append(inputs["input_ids"].numel())
            return super().training_step(model, inputs, *args, **kwargs)

    settings = {"max_length": 128, "include_num_input_tokens_seen": "non_padding"}
    apart = trainer_of(tmp_path / "a", rows, prefix_sharing="off", **settings)
    expected = apart.train().metrics
    shared = trainer_of(tmp_path / "b", rows, cls=Sees, prefix_sharing="bin", **settings)
    found = shared.train().metrics
    for name in ("documents", "tokens", "trained_tokens", "documents_per_step"):
        assert found[f"train_{name}"] == expected[f"train_{name}"]
    assert shared.state.num_input_tokens_seen == apart.state.num_input_tokens_seen
    assert "train_computed_tokens" not in expected
    assert found["train_computed_tokens"] == sum(computed) < 0.8 * found["train_tokens"]
    assert found["train_utilization"] == sum(computed) / (len(computed) * 128)
    rate = sum(computed) / found["train_seconds"]
    assert found["train_computed_tokens_per_second"] == pytest.approx(rate)
    assert f"<b>{sum(computed):,}</b>" in (tmp_path / "b" / "run.html").read_text()


# --- where it is shown ----------------------------------------------------------------------------


def test_a_printed_log_holds_what_a_person_reads_and_the_history_holds_all(tmp_path, capsys):
    rows = documents_of_lengths([20, 9, 14, 30])
    rows = [row | {"source": "ab"[i % 2]} for i, row in enumerate(rows)]
    trainer = trainer_of(tmp_path, rows, source_column="source", max_steps=1)
    trainer.train()
    printed = next(line for line in capsys.readouterr().out.splitlines() if "'loss'" in line)
    for shown in ("tokens_per_second", "utilization", "documents_per_step", "loss_a"):
        assert f"'{shown}'" in printed
    more = {"trained_tokens_per_second", "documents_per_second", "num_tokens_a"}
    assert not any(f"'{name}'" in printed for name in more)
    assert more < trainer.state.log_history[0].keys()


# --- two ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor_parallel", "tokens"), [(1, 10), (2, 5)])
def test_the_sums_of_two_ranks_need_one_wait(tensor_parallel, tokens, tmp_path, monkeypatch):
    """The other rank has counted the same row of 5 tokens, in the same second."""
    trainer = trainer_of(tmp_path)
    now = [0.0]
    monkeypatch.setattr(ThroughputMeter, "clock", staticmethod(lambda: now[0]))
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda tensor: tensor.repeat(2, 1))
    totals = []
    meter = ThroughputMeter(
        trainer.args,
        trainer.accelerator,
        LossSums(),
        tp_size=tensor_parallel,
        balances=False,
        means={},
        set_total=totals.append,
        is_packed=True,
    )
    meter.start_run(trainer.state, 1000)
    row = PackedCollator(tensors_only=True)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    meter.count([row], room=8)
    now[0], trainer.state.global_step = 1.0, 1
    with counted_waits(monkeypatch) as waits:
        waits.step = 1
        meter.add_up_before({"loss": 1.0, "learning_rate": 0.1})
        with meter.pause():  # an evaluation after the log, in the same step
            pass
    assert waits.of("trl_packing") == [1]
    assert totals == [1000 + tokens]
    assert meter.take_logs()[1]["tokens_per_second"] == tokens


RANKS = {
    "packed": {"epochs": 2},
    "idle rank": {"lengths": [32, 32, 32]},  # one of them ends with an empty micro-batch
    "stream": {"stream": True, "max_steps": 4},
}


@pytest.mark.slow
def test_two_ranks_log_what_both_trained(tmp_path):
    scenarios = {name: scenario(tmp_path / name, **each) for name, each in RANKS.items()}
    for name, ranks in run_on_ranks(scenarios, tmp_path / "results").items():
        assert_logged(ranks, tmp_path / name, room=CAPACITY)
