"""A lock of one process on a folder, which ends with the process, however that ends.

    command            holds FOLDER/lock
      ├── worker       has closed it, and ends with the command
      └── worker

`flock` locks an open file, which forked processes share: after SIGKILL of the command, its workers
would hold the lock, and write on.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

_RACES = 100  # against commands that end and delete the file meanwhile


@dataclass(frozen=True)
class _Owner:
    process: int
    thread: int


_held: dict[int, _Owner] = {}  # by the descriptor of the open file


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`, a file that is made with its folder.

    Its owner may delete the file. Threads of a process exclude one another, too. Windows and some
    file systems have no such locks: there, nobody is excluded.

    Raises:
        BlockingIOError: another process or thread holds it.
    """
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
        return
    handle = _locked(path)
    try:
        yield
    finally:
        if _held.pop(handle, None):  # closed already in a forked process
            os.close(handle)


def _locked(path: Path) -> int:
    """Return the descriptor of the open file `path`, which this process has locked."""
    import fcntl

    for _ in range(_RACES):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another command has just deleted the folder
            continue
        _held[handle] = _Owner(os.getpid(), threading.get_ident())
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(handle)
            raise
        except OSError:  # a file system without locks
            return handle
        if _is_open_file(path, handle):
            return handle
        _close(handle)
    raise BlockingIOError(f"{path} is locked")


def _is_open_file(path: Path, handle: int) -> bool:
    """Return whether `path` is the file that is open, and not deleted or made again."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _close(handle: int) -> None:
    del _held[handle]
    os.close(handle)


def _leave_to_parent() -> None:
    """In a forked process: close the files that are locked, and end with the parent (on Linux)."""
    owners = [*_held.values()]
    for handle in _held:
        os.close(handle)
    _held.clear()
    for owner in owners:
        # Linux sends the signal when the thread that has forked ends, so only its own children.
        if _PRCTL is not None and owner.thread == threading.get_ident():
            _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner.process:  # it has ended already
                os.kill(os.getpid(), signal.SIGKILL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
