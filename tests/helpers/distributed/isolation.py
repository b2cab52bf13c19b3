"""Check isolation of sharded models: what every rank finds goes into results/<rank>.json.

cd tests && torchrun --nproc_per_node 2 -m helpers.distributed.isolation results/
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from architectures.tiny_models import tiny_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trl_packing.isolation.guard
from helpers.distributed.train import end_rank
from helpers.leaks import with_fused_head
from trl_packing import check_isolation, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.isolation.guard import IsolationGuard, Precision


def sharded(model):
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer)
    return fully_shard(model)


def checked(name: str, attention: str, wrap) -> dict:
    torch.manual_seed(0)
    model = tiny_model(name)
    install_attention(model, resolve_attention(model, attention))
    model = wrap(model)
    before = [b.clone() for b in model.buffers()]
    report = check_isolation(model, training=True)
    return {
        "verdict": report.verdict,
        "first_layer": report.first_layer,
        "buffers_kept": all(map(torch.equal, before, model.buffers())),
    }


def raises_on_rank_1(name: str, wrap) -> str:
    """What this rank says, if rank 1 leaves one forward of the check by an error."""
    torch.manual_seed(0)
    model = with_fused_head(tiny_model(name))
    wrapped = wrap(model)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 9 and dist.get_rank() == 1:
            raise KeyError("a mistake of one rank")

    model.get_input_embeddings().register_forward_pre_hook(fail)
    guard = IsolationGuard(model, attention="auto", isolation_check="error")
    guard.select_backend(Precision("cpu", None))
    try:
        guard.ensure([], training=True, wrapped=wrapped)
    except RuntimeError as error:
        return str(error)
    return guard.attention.backend


def main(folder: str, case: str = "") -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    if case:
        PartialState(cpu=True)  # accelerate's logger asks for it
        trl_packing.isolation.guard._PATIENCE = 5.0
        said = raises_on_rank_1("llama", {"DDP": DistributedDataParallel, "FSDP2": sharded}[case])
        Path(folder, f"{case}{os.environ['RANK']}").write_text(said)
        if case == "FSDP2":
            os._exit(1)  # as an error does; the launcher then ends the other ranks
        end_rank()
    found = {
        f"{kind} {name} {attention}": checked(name, attention, wrap)
        for kind, wrap in (("DDP", DistributedDataParallel), ("FSDP2", sharded))
        for name, attention in (
            ("llama", "documents"),
            ("mamba", "model"),
            ("mamba", "padded"),
            ("mamba", "equal_lengths"),
        )
    }
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    end_rank()


if __name__ == "__main__":
    main(*sys.argv[1:])
