"""Every figure that is logged equals its definition in docs/metrics.md, counted from the batches.

Time is a counted clock: a second a micro-batch, a hundred an evaluation, a thousand a save.
"""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
from datasets import Dataset
from harness import TWO_RUNS
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.attention.flops import model_flops
from trl_packing.training import metrics as measured
from trl_packing.training.loaders import RunIsolation
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.progress_bar import ThroughputOnBar
from trl_packing.training.run_record import RunRecord

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
PAD = 0  # no document holds it
CAPACITY = 32
INTERVAL = ("tokens_per_second", "trained_tokens_per_second", "documents_per_second")


def scenario(folder, **arguments):
    return Scenario(str(folder), LENGTHS, counted_clock=True, **arguments)


def counted(batch):
    """Return documents, tokens, trained tokens and the row's length of a recorded micro-batch."""
    ids, positions, labels = (
        batch[name].flatten() for name in ("input_ids", "position_ids", "labels")
    )
    real = ids != PAD
    return (
        int(((positions == 0) & real).sum()),
        int(real.sum()),
        int((labels != -100).sum()),
        len(ids),
    )


def by_hand(ranks, steps, room):
    """Return the metrics of `steps` (numbers from 0), from what every rank has trained."""
    micro_batches = [
        [
            counted(batch)
            for step, batch in zip(rank["trained_in"], rank["inputs"], strict=True)
            if step in steps
        ]
        for rank in ranks
    ]
    documents, tokens, trained, cells = map(sum, zip(*itertools.chain(*micro_batches), strict=True))
    seconds = len(micro_batches[0])
    places = sum(map(len, micro_batches)) * room if room else cells
    return {
        "tokens_per_second": tokens / seconds,
        "trained_tokens_per_second": trained / seconds,
        "documents_per_second": documents / seconds,
        "utilization": tokens / places,
        "documents_per_step": documents / len(steps),
    }


def assert_logged(ranks, *, room, every=1):
    logged = [entry for entry in ranks[0]["history"] if "tokens_per_second" in entry]
    assert [entry["step"] for entry in logged] == list(range(every, ranks[0]["steps"] + 1, every))
    so_far = 0
    for entry in logged:
        steps = range(entry["step"] - every, entry["step"])
        expected = by_hand(ranks, steps, room)
        assert {name: entry[name] for name in expected} == pytest.approx(expected)
        seconds = sum(step in steps for step in ranks[0]["trained_in"])
        so_far += expected["tokens_per_second"] * seconds
        assert entry["num_tokens"] == pytest.approx(so_far)
        assert entry["peak_memory_gib"] > 0
        assert "mfu" not in entry  # a CPU's peak is not known
    totals, whole = ranks[0]["totals"], range(ranks[0]["steps"])
    expected = by_hand(ranks, whole, room)
    assert {n: totals[f"train_{n}"] for n in expected} == pytest.approx(expected)
    assert totals["train_seconds"] == len(ranks[0]["inputs"])
    assert totals["train_tokens"] == pytest.approx(so_far)
    samples = totals["train_samples_per_second"] * totals["train_runtime"]
    assert samples == pytest.approx(totals["train_documents"], rel=0.01)  # both are rounded
    assert ranks[0]["history"][-1].items() >= totals.items()


# --- one rank -------------------------------------------------------------------------------------

RUNS = {
    "packed": ({}, CAPACITY),
    "packed, two bins": ({"batch_size": 2, "accumulation": 2, "epochs": 2}, 2 * CAPACITY),
    "max_steps": ({"max_steps": 4}, CAPACITY),
    "padding-free": ({"packing": False, "batch_size": 2, "accumulation": 2}, None),
    "documents_per_step": ({"accumulation": 2, "options": {"documents_per_step": 5}}, None),
    "stream": ({"stream": True, "max_steps": 5}, CAPACITY),
    "stream, padding-free": (
        {"stream": True, "max_steps": 5, "packing": False, "batch_size": 2},
        None,
    ),
    "pad_to_multiple_of": ({"options": {"pad_to_multiple_of": 8}}, CAPACITY),
    "padding-free, pad_to_multiple_of": (
        {"packing": False, "batch_size": 3, "options": {"pad_to_multiple_of": 16}},
        None,
    ),
    "document weights": ({"options": {"loss_weighting": "document"}}, CAPACITY),
}


FAST = ("packed, two bins", "padding-free", "stream", "pad_to_multiple_of")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_what_is_logged_is_what_was_trained(name, tmp_path):
    arguments, room = RUNS[name]
    result = run(scenario(tmp_path, **arguments))
    assert_logged([result], room=room)
    if "pad_to" in name:  # the control: with the padding it is another number
        padded = sum(len(batch) for batch in result["batches"])
        assert padded > result["totals"]["train_tokens"]


class OverridesStep(PackedSFTTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class OverridesLoss(PackedSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


class OverridesBoth(OverridesLoss, OverridesStep):
    pass


@pytest.mark.parametrize("own", [OverridesStep, OverridesLoss, OverridesBoth])
def test_a_step_of_a_user_s_own_is_counted(own, tmp_path):
    expected, found = (
        trainer_of(documents_of_lengths(LENGTHS), tmp_path, cls=trainer).train().metrics
        for trainer in (PackedSFTTrainer, own)
    )
    counts = ("train_documents", "train_tokens", "train_trained_tokens", "train_utilization")
    assert {name: found[name] for name in counts} == {name: expected[name] for name in counts}
    assert found["train_documents"] == len(LENGTHS)
    assert found["train_tokens"] == sum(LENGTHS)
    samples = found["train_samples_per_second"] * found["train_runtime"]
    assert samples == pytest.approx(len(LENGTHS), rel=0.02)  # both are rounded


def test_several_steps_are_logged_as_one_interval(tmp_path):
    options = {"logging_steps": 3}
    result = run(scenario(tmp_path, epochs=2, max_steps=9, options=options))
    assert_logged([result], room=CAPACITY, every=3)


def test_steps_after_the_last_log_are_in_the_totals(tmp_path):
    result = run(scenario(tmp_path, max_steps=5, options={"logging_steps": 3}))
    expected = by_hand([result], range(5), CAPACITY)
    assert result["totals"]["train_tokens"] == 5 * expected["tokens_per_second"]
    assert result["totals"]["train_documents"] == 5 * expected["documents_per_step"]


def test_evaluation_and_saving_take_no_time_of_training(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    result = run(
        scenario(tmp_path, eval_lengths=LENGTHS, save_steps=2, max_steps=5, options=options)
    )
    evaluated = [entry for entry in result["history"] if "eval_loss" in entry]
    assert len(evaluated) == 4  # before, at the start, after 2 and after 4 steps
    assert_logged([result], room=CAPACITY)
    # The control: with a clock that never stops it would be another number.
    before = Scenario(str(tmp_path), LENGTHS, counted_clock=True, max_steps=2, save_steps=1)
    with patch.object(ThroughputMeter, "pause", lambda self: nullcontext()):
        slow = run(before)
    assert slow["totals"]["train_seconds"] > 1000


def test_the_isolation_check_takes_no_time_of_training(tmp_path, monkeypatch):
    now = [0.0]

    class Counted(PackedSFTTrainer):
        def training_step(self, *args, **kwargs):
            now[0] += 1
            return super().training_step(*args, **kwargs)

    check = RunIsolation.ensure

    def slow_check(self, *args, **kwargs):
        now[0] += 1000
        check(self, *args, **kwargs)

    monkeypatch.setattr(RunIsolation, "ensure", slow_check)
    monkeypatch.setattr(ThroughputMeter, "clock", staticmethod(lambda: now[0]))
    rows = documents_of_lengths(LENGTHS)
    trainer = trainer_of(rows, tmp_path, cls=Counted, max_steps=3, isolation_check="error")
    assert trainer.train().metrics["train_seconds"] == 3
    assert now == [1003]


def test_num_tokens_are_those_of_training_also_at_an_evaluation(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 2,
        "pad_to_multiple_of": 16,
    }
    result = run(scenario(tmp_path, eval_lengths=LENGTHS, max_steps=3, options=options))
    seen = [entry["eval_num_tokens"] for entry in result["history"] if "eval_num_tokens" in entry]
    tokens = [counted(batch)[1] for batch in result["inputs"]]
    assert seen == [*itertools.accumulate(tokens)]


def test_a_resumed_run_counts_what_it_trains_itself(tmp_path):
    whole = scenario(tmp_path, epochs=2, save_steps=4)
    run(whole)
    result = run(replace(whole, resume=str(tmp_path / "checkpoint-4")))
    totals, trained = result["totals"], [counted(batch) for batch in result["inputs"]]
    assert len(trained) == result["steps"] - 4
    documents, tokens, targets, _ = map(sum, zip(*trained, strict=True))
    assert totals["train_tokens"] == tokens
    assert totals["train_trained_tokens"] == targets
    assert totals["train_documents"] == documents
    assert totals["train_documents_per_step"] == documents / len(trained)
    # One interval begins where the resumed run does.
    first = next(e for e in result["history"] if e["step"] == 5 and "tokens_per_second" in e)
    assert first["tokens_per_second"] == trained[0][1]


def test_transformers_own_count_leaves_out_padding_by_its_place(tmp_path):
    options = {"include_num_input_tokens_seen": "non_padding", "pad_to_multiple_of": 16}
    result = run(scenario(tmp_path, options=options))
    seen = [e["num_input_tokens_seen"] for e in result["history"] if "loss" in e]
    assert seen[-1] == sum(LENGTHS) == result["totals"]["train_tokens"]


def test_eos_that_is_the_padding_token_is_counted(tmp_path):
    rows = documents_of_lengths(LENGTHS)
    for row in rows:
        row["input_ids"][-1] = row["labels"][-1] = tiny_tokenizer().eos_token_id
    trainer = trainer_of(
        rows,
        tmp_path,
        tokenizer=tiny_tokenizer(pad="<eos>"),
        include_num_input_tokens_seen="non_padding",
    )
    metrics = trainer.train().metrics
    assert metrics["train_tokens"] == sum(LENGTHS)
    assert trainer.state.num_input_tokens_seen == sum(LENGTHS)


# --- where it is shown ----------------------------------------------------------------------------


def trainer_of(rows, folder, *, tokenizer=None, cls=PackedSFTTrainer, collator=None, **options):
    settings = {
        "output_dir": str(folder),
        "max_length": CAPACITY,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "isolation_check": "off",
    }
    return cls(
        tiny_model("llama"),
        PackedSFTConfig(**settings | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or tiny_tokenizer(),
        data_collator=collator,
    )


def test_tensorboard_receives_them(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path, report_to="tensorboard")
    trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    for name in ("tokens_per_second", "utilization", "documents_per_step"):
        sent = [event.value for event in events.Scalars(f"train/{name}")]
        assert sent == pytest.approx(
            [entry[name] for entry in logged], rel=TWO_RUNS
        )  # float32 in its file
    assert events.Scalars("train/train_tokens")[0].value == sum(LENGTHS)


def test_the_progress_bar_shows_them_once_a_log(tmp_path, monkeypatch, capsys):
    shown = []

    class Bar:
        def __init__(self, *args, **kwargs): ...
        def update(self, *args): ...
        def write(self, text): ...
        def close(self): ...
        def set_postfix_str(self, text):
            shown.append(text)

    monkeypatch.setattr("transformers.trainer_callback.tqdm", Bar)
    rows = documents_of_lengths(LENGTHS)
    trainer = trainer_of(rows, tmp_path, disable_tqdm=False, logging_steps=2, max_steps=6)
    trainer.train()
    assert any(isinstance(c, ProgressCallback) for c in trainer.callback_handler.callbacks)
    assert len(shown) == 3
    assert all("tokens/s, " in text and "% full" in text for text in shown)


def test_a_notebook_shows_them_before_its_bar(tmp_path):
    class Notebook(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            from transformers.utils.notebook import NotebookProgressBar

            self.training_tracker = NotebookProgressBar(8)

    pytest.importorskip("IPython", reason="transformers' notebook bar needs IPython")
    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path)
    notebook = Notebook()
    trainer.add_callback(notebook)
    trainer.train()
    assert "tokens/s" in notebook.training_tracker.prefix


def test_a_bar_without_room_for_them_is_left_alone(tmp_path):
    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path)

    class Rich(TrainerCallback):
        training_bar = object()
        training_tracker = None

    trainer.add_callback(Rich())
    trainer.train()
    assert any(isinstance(c, ThroughputOnBar) for c in trainer.callback_handler.callbacks)


# --- who logs them --------------------------------------------------------------------------------


def test_trl_s_path_logs_what_trl_logs(tmp_path):
    rows = documents_of_lengths(LENGTHS)

    def collate(documents):
        batch = PackedCollator()(documents)
        return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}

    trainer = trainer_of(rows, tmp_path, collator=collate)
    metrics = trainer.train().metrics
    names = set().union(*trainer.state.log_history) | set(metrics)
    assert "num_tokens" in names
    assert not names & {*INTERVAL, "utilization", "documents_per_step", "train_tokens"}


def test_a_collator_that_says_nothing_of_its_rows_logs_nothing(tmp_path):
    class Own(PackedCollator):
        def __call__(self, documents):
            return super().__call__(documents)

    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path, collator=Own())
    trainer.train()
    assert not any("utilization" in entry for entry in trainer.state.log_history)
    assert any("loss" in entry for entry in trainer.state.log_history)
    counted = [e["num_tokens"] for e in trainer.state.log_history if "num_tokens" in e]
    assert counted[-1] == sum(LENGTHS), "TRL's count, and not 0"
    assert counted == sorted(set(counted))


def test_no_model_is_given_what_is_for_the_host(tmp_path):
    seen = []

    class Looks(PackedSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(set(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path, cls=Looks)
    assert next(iter(trainer.get_train_dataloader())).host.padding == 0
    trainer.train()
    assert seen
    named = {"input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
    assert all(names == named | {"use_cache"} for names in seen)


@pytest.mark.parametrize("known", [True, False])
def test_mfu_is_logged_where_the_peak_is_known(known, tmp_path, monkeypatch):
    peak = 1e9 if known else None
    monkeypatch.setattr(ThroughputMeter, "peak_flops", lambda self: peak)
    trainer = trainer_of(documents_of_lengths(LENGTHS), tmp_path)
    metrics = trainer.train().metrics
    if not known:
        assert not any("mfu" in name for name in metrics)
        return
    import numpy as np

    lengths = np.array(LENGTHS)
    flops = model_flops(trainer.model).of(lengths, sum(LENGTHS) - len(LENGTHS))
    assert metrics["train_mfu"] == pytest.approx(flops / metrics["train_seconds"] / peak)
    assert all(math.isfinite(e["mfu"]) for e in trainer.state.log_history if "loss" in e)


def test_a_model_that_cannot_be_counted_has_no_mfu(tmp_path, monkeypatch):
    monkeypatch.setattr(ThroughputMeter, "peak_flops", lambda self: 1e9)

    def refuse(model):
        raise measured.NotCountable("made for this test")

    monkeypatch.setattr(measured, "model_flops", refuse)
    metrics = trainer_of(documents_of_lengths(LENGTHS), tmp_path).train().metrics
    assert "train_tokens_per_second" in metrics
    assert "train_mfu" not in metrics


@pytest.mark.parametrize(
    ("packing", "room"), [(True, 128), pytest.param(False, None, marks=pytest.mark.slow)]
)
def test_a_shared_prefix_counts_for_each_document_and_is_computed_once(packing, room, tmp_path):
    prompt = list(range(6, 36))
    rows = [{"input_ids": [*prompt, *range(40, 40 + 2 * n)]} for n in range(1, 10)]
    rows += documents_of_lengths(LENGTHS)
    computed, real = [], []

    class Sees(PackedSFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            computed.append(inputs["input_ids"].numel())
            real.append(computed[-1] - inputs.host.padding)
            return super().training_step(model, inputs, *args, **kwargs)

    settings = {
        "max_length": 128,
        "packing": packing,
        "per_device_train_batch_size": 1 if packing else 6,
        "pad_to_multiple_of": 16,
        "include_num_input_tokens_seen": "non_padding",
    }
    apart = trainer_of(rows, tmp_path / "a", prefix_sharing="off", **settings)
    expected = apart.train().metrics
    shared = trainer_of(rows, tmp_path / "b", cls=Sees, prefix_sharing="bin", **settings)
    found = shared.train().metrics
    for name in ("documents", "tokens", "trained_tokens", "documents_per_step"):
        assert found[f"train_{name}"] == expected[f"train_{name}"]
    assert shared.state.num_input_tokens_seen == apart.state.num_input_tokens_seen
    assert "train_computed_tokens" not in expected
    assert found["train_computed_tokens"] == sum(computed) < 0.8 * found["train_tokens"]
    places = len(computed) * room if room else sum(computed)
    assert found["train_utilization"] == sum(real) / places
    seconds = found["train_seconds"]
    assert found["train_computed_tokens_per_second"] == pytest.approx(sum(computed) / seconds)
    last = [e for e in shared.state.log_history if "loss" in e][-1]
    assert last["computed_tokens_per_second"] > 0
    record = RunRecord.load(tmp_path / "b" / "run.json")
    assert record.total.tokens == found["train_tokens"]
    assert record.total.computed_tokens == sum(computed)
    assert f"<b>{sum(computed):,}</b>" in (tmp_path / "b" / "run.html").read_text()


# --- two ranks ------------------------------------------------------------------------------------

RANKS = {
    "packed": ({"epochs": 2}, CAPACITY),
    "accumulated": ({"accumulation": 2}, CAPACITY),
    "padding-free": ({"packing": False, "batch_size": 2, "accumulation": 2}, None),
    # Three bins on two ranks: one of them ends with an empty micro-batch.
    "idle rank": ({"lengths": [32, 32, 32]}, CAPACITY),
    "stream": ({"stream": True, "max_steps": 4}, CAPACITY),
    "document weights": ({"options": {"loss_weighting": "document"}}, CAPACITY),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    scenarios = {
        name: Scenario(str(base / name), counted_clock=True, **{"lengths": LENGTHS, **arguments})
        for name, (arguments, _) in RANKS.items()
    }
    return run_on_ranks(scenarios, base / "results")


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_log_what_both_trained(name, two_ranks):
    _, room = RANKS[name]
    ranks = two_ranks[name]
    assert_logged(ranks, room=room)
    if name == "idle rank":
        assert sum(counted(b)[0] == 0 for rank in ranks for b in rank["inputs"]) == 1
        assert ranks[0]["totals"]["train_documents"] == 3
    # The control: what one rank trained is less.
    own = by_hand(ranks[:1], range(ranks[0]["steps"]), room)
    assert own["tokens_per_second"] < ranks[0]["totals"]["train_tokens_per_second"]


def test_a_printed_log_holds_what_a_person_reads_and_the_history_holds_all(tmp_path, capsys):
    rows = Dataset.from_list(
        [
            row | {"source": "ab"[i % 2]}
            for i, row in enumerate(documents_of_lengths([20, 9, 14, 30]))
        ]
    )
    settings = {"max_length": 32, "logging_steps": 1, "max_steps": 1, "disable_tqdm": True}
    trainer = PackedSFTTrainer(
        tiny_model("llama"),
        PackedSFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, source_column="source", **settings
        ),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    printed = next(line for line in capsys.readouterr().out.splitlines() if "'loss'" in line)
    for shown in ("tokens_per_second", "utilization", "documents_per_step", "loss_a"):
        assert f"'{shown}'" in printed
    more = {"trained_tokens_per_second", "documents_per_second", "num_tokens_a"}
    assert not any(f"'{name}'" in printed for name in more)
    assert more < trainer.state.log_history[0].keys()
