"""Batches hold tensors only; the numbers that the host knows go along with them."""

import pickle
import threading
from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset
from harness import make_trainer
from helpers.tiny import documents_of_lengths, tiny_model
from torch.utils.data import DataLoader

from trl_packing import PackedCollator
from trl_packing.documents import host_row as module
from trl_packing.documents.host_row import (
    cached_values,
    for_kernels,
    host_row,
    rows_alive,
    to_device,
)

DOCUMENTS = documents_of_lengths([3, 21, 17, 5, 30, 9], prompt=2)
KEYS = {"input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}


BATCHES = [
    (DOCUMENTS, {"packing": False, "pad_to_multiple_of": 8, "dataloader_num_workers": 1}),
    ([d | {"loss_weights": [0.5] * len(d["input_ids"])} for d in DOCUMENTS], {}),
    (DOCUMENTS, {"static_shapes": True}),
]


@pytest.mark.parametrize(("documents", "options"), BATCHES, ids=["workers", "weighted", "static"])
def test_batches_of_every_loader_hold_tensors_only(documents, options, tmp_path):
    evaluated = Dataset.from_list(documents)
    trainer = make_trainer(tmp_path, documents, evaluated=evaluated, max_length=80, **options)
    trainer.model.eval()
    for batch in chain(trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        moved = {name: value.to("cpu") for name, value in batch.items()}
        weights = moved.pop("loss_weights", None)
        assert (set(moved), weights is not None) == (KEYS, "loss_weights" in documents[0])
        longest = int(batch["cu_seq_lens_q"].diff().max())
        assert batch.host.max_length in ({30, 80} if "static_shapes" in options else {longest})
        labels = moved.pop("labels")
        expected = alone(batch)
        logits = trainer.model(**moved).logits
        torch.testing.assert_close(logits[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)
        assert labels.shape == logits.shape[:2]


def alone(batch):
    """Return the logits of the row's documents, one at a time, without what fills it up."""
    model = tiny_model("llama").eval()
    sizes = [*batch.host.lengths.tolist(), batch.host.padding]
    rows = batch["input_ids"].split(sizes, 1)[:-1]
    return torch.cat([model(input_ids=row.clone(), use_cache=False).logits for row in rows], 1)


def test_the_numbers_come_along_with_the_tensors():
    collator = PackedCollator(pad_to_multiple_of=8, tensors_only=True)
    loader = DataLoader(DOCUMENTS, batch_size=3, collate_fn=collator, num_workers=1)
    for batch in (b.to("cpu") for b in loader):
        assert cached_values(batch["labels"]) is not None
        assert cached_values(batch["cu_seq_lens_q"]).tolist() == batch["cu_seq_lens_q"].tolist()
        assert any(ids is batch["input_ids"] for ids, _ in rows_alive())
        again = pickle.loads(pickle.dumps(batch))
        assert host_row(again).boundaries.tolist() == host_row(batch).boundaries.tolist()
        assert cached_values(again["labels"]) is not None


def test_a_batch_is_read_for_kernels_with_or_without_its_row_and_forgotten_when_it_is_gone():
    before = len(rows_alive())
    batch = PackedCollator(tensors_only=True)(DOCUMENTS)
    assert len(rows_alive()) == before + 1
    for given in (batch, {name: value.clone() for name, value in batch.items()}, dict(batch)):
        made = for_kernels(given)
        assert (made["max_length_q"], made["max_length_k"], made["use_cache"]) == (30, 30, False)
    del batch, given, made
    assert len(rows_alive()) == before


def test_rows_are_listed_while_another_thread_pins_rows():
    """Without a lock, which a forked worker would inherit."""
    stop = threading.Event()
    kept = []

    def pin():
        while not stop.is_set():
            kept[:] = [PackedCollator(tensors_only=True)(DOCUMENTS[:1]) for _ in range(9)]

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        assert all(len(ids) == 1 for _ in range(20_000) for ids, _ in rows_alive())
    finally:
        stop.set()
        thread.join()
    assert not any(isinstance(each, type(threading.Lock())) for each in vars(module).values())


@pytest.mark.parametrize(("numbers", "is_pinned"), [(8_000, False), (9_000, True)])
def test_large_indices_go_to_a_gpu_from_pinned_memory(numbers, is_pinned, monkeypatch):
    """CUDA waits for a copy of more than 64 KB from other memory."""
    pinned, sent = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: sent.append(options))
    to_device(np.arange(numbers), torch.device("cuda"))
    assert sent == [{"non_blocking": True}]
    assert bool(pinned) == is_pinned


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("mps", True), ("xpu", True)])
def test_only_cuda_may_read_a_batch_after_it_is_freed(device, waits, monkeypatch):
    """MPS copies from memory that holds other values by then; accelerate may ask for it."""
    sent = []

    def to(tensor, target, non_blocking):
        sent.append((torch.device(target).type, non_blocking))
        return tensor

    batch = PackedCollator()(DOCUMENTS)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch.to(device, non_blocking=True)
    to_device(np.arange(5), torch.device(device))
    assert len(sent) == len(KEYS) + 1
    assert set(sent) == {(device, not waits)}
