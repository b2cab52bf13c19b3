"""Check isolation of sharded models: what every rank finds goes into results/<rank>.json.

cd tests && torchrun --nproc_per_node 2 -m helpers.distributed.isolation results/
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from architectures.tiny_models import tiny_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.distributed.train import end_rank
from trl_packing import check_isolation, resolve_attention
from trl_packing.attention.install import install_attention


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


def main(folder: str) -> None:
    dist.init_process_group("gloo")
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
    main(sys.argv[1])
