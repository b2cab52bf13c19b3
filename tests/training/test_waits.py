"""The host waits for the device once in a step that is logged, and not at all in any other.

`waits` says what counts as one, on a CPU, of all packages: TRL's own loss waits six times in a
micro-batch, transformers' check for NaN twice, and its search for documents once in a forward.
"""

import pytest
import torch
from architectures.tiny_models import tiny_model as architecture
from datasets import Dataset
from harness import make_trainer
from helpers.combinations import fast
from helpers.tiny import documents_of_lengths, tiny_model
from helpers.waits import Waits, counted_waits

from trl_packing import PackedSFTTrainer

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
STEPS = 2

RUNS = {
    "documents": {},
    "sinks": {"model": "gpt_oss"},
    "padded rows": {"attention": "padded"},
    "explicit mask, window": {"attention": "mask", "model": "mistral"},
    "padding-free, dft": {"packing": False, "loss_weighting": "sqrt", "loss_type": "dft"},
    "smoothing, weighted": {"label_smoothing_factor": 0.1, "loss_weighting": "document"},
    "stream": {"stream": True, "pad_to_multiple_of": 8},
    "experts": {"model": "qwen3_moe", "router_aux_loss_coef": 0.01},
    "TRL's kernels": {"kernels": True, "sources": True},
    "shared prefixes": {"shared": True, "sources": True},
    "shared, soft-cap": {"shared": True, "model": "gemma2", "gradient_checkpointing": True},
}
FAST = ("documents", "padded rows", "explicit mask, window", "experts", "TRL's kernels")


def trained(waits: Waits, folder, *, every=1, **options):
    """Train `STEPS` steps of two micro-batches, counting the waits of each."""
    shared, sources, stream = (options.pop(flag, None) for flag in ("shared", "sources", "stream"))
    model = options.pop("model", "llama")
    model = tiny_model(model) if model in ("llama", "mistral", "gemma2") else architecture(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = [
        [token % vocabulary for token in row["input_ids"]]
        for row in documents_of_lengths(LENGTHS, prompt=2)
    ]
    if shared:
        ids = [ids[1] + each for each in ids]
        options |= {"prefix_sharing": "bin", "max_length": 128}
    rows = Dataset.from_dict({"input_ids": ids})
    if sources:
        rows = rows.add_column("source", ["abc"[n % 3] for n in range(len(rows))])
        options |= {"source_column": "source"}

    class Watched(PackedSFTTrainer):
        def get_batch_samples(self, *args, **kwargs):
            waits.step = self.state.global_step
            waits.mark(list(self.model.parameters()), list(self.model.buffers()))
            return super().get_batch_samples(*args, **kwargs)

        def _prepare_inputs(self, inputs):
            waits.mark({k: v for k, v in inputs.items() if torch.is_tensor(v)})
            return super()._prepare_inputs(inputs)

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            waits.step = None

    settings = {"max_length": 32, "per_device_train_batch_size": 1, "max_steps": STEPS}
    settings |= {"gradient_accumulation_steps": 2, "logging_steps": every}
    trainer = make_trainer(
        folder,
        rows.to_iterable_dataset() if stream else rows,
        model,
        cls=Watched,
        **settings | {"isolation_check": "off"} | options,
    )
    if shared:  # `Watched` computes the loss of the class above it
        trainer._before_training.sharing.loss_is_ours = lambda: True
    trainer.train()
    assert trainer.data_collator.shares_prefixes == bool(shared)
    assert ("loss_a" in trainer.state.log_history[0]) == bool(sources and every == 1)


@pytest.mark.parametrize("name", fast(RUNS, FAST))
def test_a_step_waits_once_where_it_is_logged(name, tmp_path, monkeypatch):
    options = dict(RUNS[name])
    with counted_waits(monkeypatch) as waits:
        if options.pop("kernels", False):
            monkeypatch.setattr("trl_packing.loss.lm_head._use_triton", lambda device: True)
        trained(waits, tmp_path, **options)
    ((site, number),) = waits.sites.items()
    assert site.startswith("wait_for at metrics.py:")
    assert number == STEPS
    assert waits.of("trl_packing") == [1] * STEPS
    if options.get("attention") != "padded":  # masks are read there
        others = waits.counts.total() - STEPS  # the loss and the norm of gradients, once a log
        assert others <= 4 * STEPS, waits.counts
    assert not waits.of("autograd")


def test_a_step_that_is_not_logged_neither_waits_nor_gathers_metrics(tmp_path, monkeypatch):
    gathered = []
    monkeypatch.setattr("accelerate.Accelerator.gather_for_metrics", gathered.append)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10)
    assert not waits.counts, waits.counts
    assert not gathered


def test_without_what_the_collator_knows_every_micro_batch_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.documents.host_row.cache_values", lambda *args: None)
    with counted_waits(monkeypatch) as waits:
        trained(waits, tmp_path, every=10)
    assert min(waits.of("trl_packing")) >= 2
