"""The origin of measured numbers (command, hardware, versions), and the memory of a process."""

import importlib.metadata
import os
import platform
import shlex
import sys
import threading
from pathlib import Path


def provenance(packages: tuple[str, ...] = ("torch", "transformers", "trl")) -> str:
    """Return command, hardware and versions as lines of Markdown."""
    command = shlex.join(["python", *sys.argv])
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


def anonymous_mib() -> float:
    """Return the anonymous memory of this process (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10


class Peak(threading.Thread):
    """Samples the memory of this process ten times a second until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stop, self.mib = threading.Event(), 0.0

    def run(self):
        while not self.stop.wait(0.1):
            self.mib = max(self.mib, anonymous_mib())
