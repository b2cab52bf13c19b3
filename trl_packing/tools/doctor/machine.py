"""Facts about this machine: devices and their speed by dtype, disk space, the hub.

`read_machine` reads them. Everything that judges them takes a `Machine`, so that a test can judge a
GPU that is not there.
"""

import os
import platform
import shutil
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import constants, get_token

_SIZE = 512  # of the square matrices whose product is timed
_REPEATS = 5


@dataclass(frozen=True)
class Device:
    """A device that can train.

    Attributes:
        kind: ``"cuda"``, ``"mps"``, ``"xpu"`` or ``"cpu"``.
        name: of the product.
        total_bytes: its memory; None if it is not known.
        free_bytes: the part that no process uses now.
        capability: CUDA's compute capability, such as (8, 0).
        milliseconds: time of a matrix product, by the name of its dtype.
    """

    kind: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Disk:
    """Space of the file system that holds a folder, in bytes."""

    purpose: str
    path: str
    free_bytes: int
    writable: bool


@dataclass(frozen=True)
class Hub:
    """Access to the Hugging Face hub.

    Attributes:
        endpoint: its address.
        state: ``"reachable"``, ``"offline"`` (HF_HUB_OFFLINE is set) or ``"not reachable"``.
        token: whether a token is set; the token itself is never read out.
    """

    endpoint: str
    state: str
    token: bool


@dataclass(frozen=True)
class Machine:
    """Everything that the doctor judges beside the libraries."""

    python: str
    system: str
    devices: tuple[Device, ...]
    disks: tuple[Disk, ...]
    hub: Hub

    @property
    def device(self) -> Device:
        """The device that training uses."""
        return self.devices[0]


def read_machine(output_dir: str, *, use_cpu: bool = False, seconds: float = 3.0) -> Machine:
    """Return the facts of this machine.

    Args:
        output_dir: folder of the run, which need not exist.
        use_cpu: whether the run ignores accelerators.
        seconds: longest wait for the hub.
    """
    return Machine(
        python=platform.python_version(),
        system=platform.platform(terse=True),
        devices=tuple(([] if use_cpu else _accelerators()) or [_cpu()]),
        disks=(read_disk("output_dir", output_dir), read_disk("cache", constants.HF_HUB_CACHE)),
        hub=read_hub(seconds),
    )


# --- devices --------------------------------------------------------------------------------------


def _accelerators() -> list[Device]:
    if torch.cuda.is_available():
        return [_cuda(index) for index in range(torch.cuda.device_count())]
    for kind in ("mps", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and getattr(backend, "is_available", lambda: False)():
            return [Device(kind, kind.upper(), milliseconds=time_products(kind))]
    return []


def _cuda(index: int) -> Device:
    free, total = torch.cuda.mem_get_info(index)
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_name(index),
        total_bytes=total,
        free_bytes=free,
        capability=torch.cuda.get_device_capability(index),
        milliseconds=time_products(f"cuda:{index}") if index == 0 else {},
    )


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, free = _ram()
    name = f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    return Device("cpu", name, total, free, milliseconds=time_products("cpu"))


def _ram() -> tuple[int | None, int | None]:
    """Return total and free memory in bytes, within the limit of a container."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError, AttributeError):
        return (locals().get("total"), locals().get("free"))
    if limit.isdigit():
        total, free = min(total, int(limit)), min(free, int(limit) - used)
    return total, free


def time_products(device: str) -> dict[str, float]:
    """Return the milliseconds of a matrix product on a device, by dtype; the best of a few."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            found[str(dtype).removeprefix("torch.")] = _milliseconds(device, dtype)
        except RuntimeError:  # the device does not compute in it
            continue
    return found


def _milliseconds(device: str, dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
        best = min(best, time.perf_counter() - start)
    return best * 1000


# --- disk and hub ---------------------------------------------------------------------------------


def read_disk(purpose: str, path: str) -> Disk:
    """Return the space where `path` is, or would be made."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    home = str(Path.home())  # not shown: the JSON goes into bug reports
    shown = str(path).replace(home, "~", 1) if len(home) > 1 else str(path)
    return Disk(purpose, shown, shutil.disk_usage(folder).free, writable)


def read_hub(seconds: float) -> Hub:
    """Return whether the hub answers within `seconds`. Nothing about this machine is sent."""
    endpoint, token = constants.ENDPOINT, get_token() is not None
    if constants.HF_HUB_OFFLINE:
        return Hub(endpoint, "offline", token)
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
        except urllib.error.HTTPError:
            answers.append(True)  # it is there, and refuses this request
        except (OSError, ValueError):
            answers.append(False)
        else:
            answers.append(True)

    # In a thread, because no timeout covers the search for the address.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return Hub(endpoint, "reachable" if answers == [True] else "not reachable", token)
