"""The origin of measured numbers (command, hardware, versions), and the memory of a process."""

import importlib.metadata
import multiprocessing
import os
import platform
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Settings of a trainer on a CPU that reports and saves nothing.
ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
ON_CPU |= {"save_strategy": "no"}


def provenance(packages: tuple[str, ...] = ("torch", "transformers", "trl")) -> str:
    """Return command, hardware and versions as lines of Markdown."""
    # A reader has other folders than this machine.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    command = shlex.join(["python", *words])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (
        f"`{command}`\n\n"
        f"{cpu_model()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}\n"
    )


def cpu_model() -> str:
    """Return the name of the processor if the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a GitHub-flavored table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def publish(text: str, output: str | None) -> None:
    """Print `text`, and write it to `output` if that is a path."""
    print(text)
    if output:
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def in_process(measure: Callable[..., None], *arguments: Any) -> Any:
    """Run ``measure(*arguments, result)`` in a separate process; return what it sends."""
    spawn = multiprocessing.get_context("spawn")
    received, result = spawn.Pipe(duplex=False)
    process = spawn.Process(target=measure, args=(*arguments, result))
    process.start()
    result.close()  # otherwise this would wait for a process that has failed
    taken = received.recv()
    process.join()
    return taken


def anonymous_mib() -> float:
    """Return the anonymous memory of this process (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10


def anonymous_mib_of_tree(process: int) -> float:
    """Return the anonymous memory of a process and of all that it started (Linux).

    A page that several of them share is counted once.
    """
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            status = (folder / "status").read_text()
            parents[int(folder.name)] = int(status.split("PPid:")[1].split()[0])

    def is_inside(number: int) -> bool:
        while number not in (0, process):
            number = parents.get(number, 0)
        return number == process

    total = 0
    for number in filter(is_inside, parents):
        with suppress(FileNotFoundError, ProcessLookupError, IndexError):
            pages = Path(f"/proc/{number}/smaps_rollup").read_text()
            total += int(pages.split("Pss_Anon:")[1].split()[0])
    return total / 2**10


class Peak(threading.Thread):
    """Samples memory until it is stopped.

    Args:
        measure: returns the memory in MiB; by default, that of this process.
        interval: seconds between samples.
    """

    def __init__(self, measure: Callable[[], float] = anonymous_mib, interval: float = 0.1):
        super().__init__(daemon=True)
        self.measure, self.interval = measure, interval
        self.stop = threading.Event()
        self.mib = 0.0

    def run(self):
        while not self.stop.wait(self.interval):
            self.mib = max(self.mib, self.measure())
