"""The devices of one process: their peak FLOP/s and their peak memory."""

import sys

import torch
from trl import SFTTrainer

from trl_packing.attention.flops import peak_flops


def peak_flops_of(trainer: SFTTrainer) -> float | None:
    """Return the peak of this process' devices in FLOP/s, None if unknown."""
    args = trainer.args
    if args.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(args.device), _matrix_dtype(trainer))
    return None if peak is None else peak * max(args.n_gpu, 1)


def _matrix_dtype(trainer: SFTTrainer) -> str:
    """Return the type in which matrix products are computed."""
    args = trainer.args
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    dtype = str(trainer.model.dtype).removeprefix("torch.")
    is_tf32 = dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_tf32 else dtype


def peak_memory_bytes(device: torch.device) -> float | None:
    """Return the peak memory in bytes, None if unknown.

    On a CPU it is that of the process. Otherwise it is the memory of PyTorch on `device` since the
    process began, or since `reset_peak_memory_stats` was called.
    """
    if device.type != "cpu":
        most = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return None if most is None else float(most(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
