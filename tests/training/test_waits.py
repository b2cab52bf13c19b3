"""The host waits for the device once in a step that is logged, and not at all in any other.

`waits` says what counts as one, on a CPU, of all packages: TRL's own loss waits six times in a
micro-batch, transformers' check for NaN twice, and its search for documents once in a forward.
"""

import pytest
import torch
from architectures.tiny_models import tiny_model as architecture
from datasets import Dataset
from harness import make_trainer
from helpers.tiny import documents_of_lengths, tiny_model
from helpers.waits import Waits, counted_waits
from peft import LoraConfig

import trl_packing
from trl_packing import PackedCollator, PackedSFTTrainer
from trl_packing.attention.model_facts import unwrap_peft
from trl_packing.loss.lm_head import use_native_head

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
STEPS = 2

RUNS = {
    "documents": {},
    "soft-cap": {"model": "gemma2"},
    "sinks": {"model": "gpt_oss"},
    "padded rows": {"attention": "padded"},
    "equal lengths": {"attention": "equal_lengths"},
    "explicit mask, window": {"attention": "mask", "model": "mistral"},
    "padding-free": {"packing": False, "per_device_train_batch_size": 2},
    "sqrt, dft": {"loss_weighting": "sqrt", "loss_type": "dft"},
    "smoothing, weighted": {"label_smoothing_factor": 0.1, "loss_weighting": "document"},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "stream": {"stream": True},
    "by source": {"sources": True},
    "by source, shared prefixes": {"sources": True, "shared": True},
    "LoRA": {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])},
    "experts": {"model": "qwen3_moe", "router_aux_loss_coef": 0.01},
    "TRL's kernels": {"kernels": True, "sources": True},
    "own head, padded": {"own_head": True, "attention": "padded"},
    "shared prefixes": {"shared": True},
    "shared prefixes, soft-cap, checkpointing": {
        "shared": True,
        "model": "gemma2",
        "gradient_checkpointing": True,
    },
}
FAST = ("documents", "padded rows", "explicit mask, window", "experts", "TRL's kernels")


def trained(waits: Waits, folder, *, every=1, control=None, **options):
    """Train `STEPS` steps of two micro-batches, counting the waits of each."""
    model = options.pop("model", "llama")
    model = tiny_model(model) if model in ("llama", "mistral", "gemma2") else architecture(model)
    rows = documents_of_lengths(LENGTHS, prompt=2)
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = Dataset.from_list(
        [{"input_ids": [i % vocabulary for i in r["input_ids"]]} for r in rows]
    )
    shared = options.pop("shared", False)
    if shared:
        prompt = rows[1]["input_ids"]
        rows = Dataset.from_list([{"input_ids": prompt + r["input_ids"]} for r in rows])
        options |= {"prefix_sharing": "bin", "max_length": 128}
    if options.pop("sources", False):
        rows = rows.add_column("source", ["abc"[n % 3] for n in range(len(rows))])
        options |= {"source_column": "source"}
    if options.pop("stream", False):
        rows = rows.to_iterable_dataset()
    own_head, peft_config = options.pop("own_head", False), options.pop("peft_config", None)

    class Watched(PackedSFTTrainer):
        def get_batch_samples(self, *args, **kwargs):
            waits.step = self.state.global_step
            waits.mark(list(self.model.parameters()), list(self.model.buffers()))
            return super().get_batch_samples(*args, **kwargs)

        def _prepare_inputs(self, inputs):
            waits.mark({k: v for k, v in inputs.items() if torch.is_tensor(v)})
            return super()._prepare_inputs(inputs)

        def compute_loss(self, model, inputs, *args, **kwargs):
            if control is not None:
                control(inputs["labels"])
            return super().compute_loss(model, inputs, *args, **kwargs)

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            waits.step = None

    trainer = make_trainer(
        folder,
        rows,
        model,
        cls=Watched,
        arguments={"peft_config": peft_config},
        **{
            "max_length": 32,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "logging_steps": every,
            "max_steps": STEPS,
            "isolation_check": "off",
        }
        | options,
    )
    if shared:  # `Watched` computes the loss of the class above it
        trainer._isolation.sharing.loss_is_ours = lambda: True
    if own_head:
        from trl_packing.attention.install import install_attention

        use_native_head(unwrap_peft(trainer.model))
        install_attention(trainer.model, trainer.attention)
    trainer.train()
    assert trainer.data_collator.shares_prefixes == shared
    logs_sources = "loss_a" in trainer.state.log_history[0]
    assert logs_sources == ("source_column" in options and every == 1)


def some(cases, fast):
    """Return the names of `cases`, those marked slow that are not `fast`."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in cases]


@pytest.mark.parametrize("name", some(RUNS, FAST))
def test_a_step_waits_once_where_it_is_logged(name, tmp_path, monkeypatch):
    with counted_waits(monkeypatch) as waits:
        options = dict(RUNS[name])
        if options.pop("kernels", False):
            monkeypatch.setattr("trl_packing.loss.lm_head._has_triton", lambda weight: True)
        trained(waits, tmp_path, **options)
    assert waits.sites == {"wait_for at metrics.py:" + _line_of_wait(): STEPS}, waits.sites
    assert waits.of("trl_packing") == [1] * STEPS
    if RUNS[name].get("attention") not in ("padded", "equal_lengths"):  # masks are read there
        others = waits.counts.total() - STEPS  # the loss and the norm of gradients, once a log
        assert others <= 4 * STEPS, waits.counts
    assert not waits.of("autograd")


def _line_of_wait() -> str:
    import inspect

    from trl_packing.training.metrics import ThroughputMeter

    lines, first = inspect.getsourcelines(ThroughputMeter)
    return str(first + next(i for i, line in enumerate(lines) if " wait_for(" in line))


def test_a_step_that_is_not_logged_neither_waits_nor_gathers_metrics(tmp_path, monkeypatch):
    gathered = []
    monkeypatch.setattr("accelerate.Accelerator.gather_for_metrics", gathered.append)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10)
    assert not waits.counts, waits.counts
    assert not gathered


def test_a_log_of_several_ranks_waits_once(tmp_path, monkeypatch):
    from trl_packing.loss.sums import LossSums
    from trl_packing.training.metrics import ThroughputMeter

    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path / "run")
        trainer = make_trainer(tmp_path, documents_of_lengths(LENGTHS), max_length=32)
        meter = ThroughputMeter(trainer, LossSums())
        meter.start_run(tokens_before=0)
        row = PackedCollator(tensors_only=True)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        meter.count([row], room=8)
        monkeypatch.setattr(type(trainer.args), "world_size", 2)

        def gather(tensor):
            gathered = torch.cat([tensor, tensor])
            waits.mark(gathered)
            return gathered

        monkeypatch.setattr(trainer.accelerator, "gather", gather)
        waits.step = STEPS
        meter.share({}, log=False)
        with meter.pause():  # an evaluation after the log, in the same step
            pass
        waits.step = None
    assert waits.of("trl_packing")[-1] == 1
    assert meter.so_far().items() >= {"documents": 4, "tokens": 10, "room": 16}.items()


# --- the counting itself: each of these must be seen ----------------------------------------------

_CONTROLS = {
    "item": "labels.sum().item()",
    "bool": "bool((labels > 0).all())",
    "tolist": "labels.tolist()",
    "cpu": "labels.cpu()",
    "numpy": "labels.numpy()",
    "mask": "labels[labels > 0]",
    "unique": "labels.unique()",
    "repeat": "torch.repeat_interleave(labels[0].clamp(0, 2))",
    "equal": "torch.equal(labels, labels + 1)",
    "blocking copy": "torch.arange(3).to(labels.device)",
    "blocking constant": "torch.tensor(3, device=labels.device)",
}


@pytest.mark.parametrize("name", some(_CONTROLS, {"item", "mask", "blocking copy"}))
def test_a_wait_that_is_added_is_counted(name, tmp_path, monkeypatch):
    path = trl_packing.__file__.replace("__init__", "control")  # as if it were in the project
    scope = {"torch": torch}
    exec(compile(f"def control(labels):\n    {_CONTROLS[name]}\n", path, "exec"), scope)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10, control=scope["control"])
    assert min(waits.of("trl_packing")) >= 2  # each micro-batch of both steps
    assert all("control.py:2" in site for site in waits.sites)


def test_what_is_not_on_the_device_is_no_wait(tmp_path, monkeypatch):
    path = trl_packing.__file__.replace("__init__", "control")
    scope = {"torch": torch}
    source = "def control(labels):\n    torch.arange(3).sum().item()\n    torch.ones(2).tolist()\n"
    exec(compile(source, path, "exec"), scope)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10, control=scope["control"])
    assert not waits.of("trl_packing")


@pytest.mark.parametrize("name", some(["documents", "shared prefixes", "padded rows"], FAST[:1]))
def test_without_what_the_collator_knows_every_micro_batch_waits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.documents.host_row.cache_row", lambda *args: None)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10, **RUNS[name])
    assert min(waits.of("trl_packing")) >= 2


def test_the_backward_of_a_mask_is_seen(monkeypatch):
    with counted_waits(monkeypatch) as waits:
        values, mask = torch.randn(4, requires_grad=True), torch.ones(1, 4, dtype=torch.bool)
        waits.mark(values, mask)
        waits.step = 0
        values.new_zeros(1, 4).masked_scatter(mask, values).sum().backward()
    assert waits.of("autograd")
