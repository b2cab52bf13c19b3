"""Check isolation of wrapped and sharded models."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from architectures.tiny_models import DOCUMENT_IDS, tiny_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import trl_packing.isolation.guard
from helpers.leaks import with_fused_head
from trl_packing import PackedCollator, check_isolation, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.isolation.guard import IsolationGuard


def sharded(model):
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": sharded}
CASES = ("llama documents", "mamba documents", "mamba padded", "mamba equal_lengths", "rwkv model")


class Collectives(TorchDispatchMode):
    """Notes the calls in which ranks exchange tensors: their names, and the bytes of exchanges."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            name = str(function)
            self.calls.append((name, args[1].nbytes if "alltoall" in name else 0))
        return function(*args, **(kwargs or {}))


def checked(name: str, attention: str, wrap) -> dict:
    torch.manual_seed(0)
    model = tiny_model(name)
    install_attention(model, resolve_attention(model, attention))
    model = wrap(model)
    before = [b.clone() for b in model.buffers()]
    verdict = check_isolation(model, training=True).verdict
    documents = [{"input_ids": [DOCUMENT_IDS[0]] * n} for n in (40, 25, 12, 6, 3, 3)]
    batch = PackedCollator()(documents)
    with torch.no_grad(), Collectives() as collectives:
        model(**{k: v for k, v in batch.items() if k not in ("labels", "target_counts")})
    return {
        "verdict": verdict,
        "buffers_kept": all(map(torch.equal, before, model.buffers())),
        "collectives": len(collectives.calls),
    }


def raises_on_rank_1(wrap) -> str:
    """What this rank says, if rank 1 leaves one forward of the check by an error."""
    torch.manual_seed(0)
    model = with_fused_head(tiny_model("llama"))
    wrapped = wrap(model)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 7 and dist.get_rank() == 1:
            raise KeyError("a mistake of one rank")

    model.get_input_embeddings().register_forward_pre_hook(fail)
    guard = IsolationGuard(model, attention="auto", isolation_check="error")
    guard.select_backend(("cpu", None))
    try:
        guard.ensure([], training=True, wrapped=wrapped)
    except RuntimeError as error:
        return str(error)
    return guard.attention.backend


def all_found(_) -> dict[str, dict]:
    """Check five models in both wrappers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    return {
        f"{kind} {case}": checked(*case.split(), wrap)
        for kind, wrap in WRAPPERS.items()
        for case in CASES
    }


def one_raises(case: tuple[str, str]) -> str:
    """Return what this rank says in the wrapper of this name; one that is sharded ends the group.

    What it says is written into the folder, too.
    """
    kind, folder = case
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    PartialState(cpu=True)  # accelerate's logger asks for it
    trl_packing.isolation.guard._PATIENCE = 5.0
    said = raises_on_rank_1(WRAPPERS[kind])
    Path(folder, f"{kind}{os.environ['RANK']}").write_text(said)
    if kind == "FSDP2":
        os._exit(1)  # as an error does; the launcher then ends the other ranks
    return said
