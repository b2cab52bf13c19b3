"""A lock ends with the process that holds it, also when its workers live on."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from trl_packing.tools.prepare.folder_lock import lock

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")

_HOLD = {
    "ours": "from trl_packing.tools.prepare.folder_lock import lock\nheld = lock(path)\n",
    # Control: a lock that forked processes inherit.
    "inherited": (
        "import fcntl\n"
        "from contextlib import contextmanager\n"
        "@contextmanager\n"
        "def hold():\n"
        "    path.parent.mkdir()\n"
        "    with open(path, 'w') as file:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX)\n"
        "        yield\n"
        "held = hold()\n"
    ),
}
_FORK = """\
with held:
    worker = os.fork()
    if not worker:
        time.sleep(600)
        os._exit(0)
    print(worker, flush=True)
    time.sleep(600)
"""


def is_free(path):
    try:
        with lock(path):
            return True
    except BlockingIOError:
        return False


def is_running(process):
    """Return whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    with suppress(FileNotFoundError):
        return stat.read_text().rpartition(") ")[2][0] not in "ZX"
    return not Path("/proc/self").exists()


def becomes_true(condition, seconds=60):
    until = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return met


@pytest.fixture
def forked(tmp_path):
    """Kill a process that holds a lock and has a worker, and return the lock and the worker."""
    workers = []

    def start(kind):
        path = tmp_path / "folder" / "lock"
        before = f"import os, time\nfrom pathlib import Path\npath = Path({str(path)!r})\n"
        code = before + _HOLD[kind] + _FORK
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
            workers.append(int(holder.stdout.readline()))
            assert not is_free(path)
            holder.kill()
        return path, workers[0]

    yield start
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_a_killed_process_leaves_no_lock_to_its_workers(forked):
    path, worker = forked("ours")
    # The process may be killed while its new worker has not yet closed the file.
    assert becomes_true(lambda: is_free(path))
    if sys.platform == "linux":
        assert becomes_true(lambda: not is_running(worker))


def test_the_workers_of_the_test_would_keep_a_lock_that_they_inherit(forked):
    path, worker = forked("inherited")
    assert is_running(worker)
    assert not becomes_true(lambda: is_free(path), seconds=0.5)


def test_threads_exclude_one_another(tmp_path):
    path, found = tmp_path / "folder" / "lock", []
    with lock(path):
        thread = threading.Thread(target=lambda: found.append(is_free(path)))
        thread.start()
        thread.join()
    assert found == [False]
    assert is_free(path)


def test_a_lock_whose_file_was_deleted_excludes_nobody(tmp_path):
    path = tmp_path / "folder" / "lock"
    with lock(path):
        path.unlink()
        path.parent.rmdir()
        with lock(path):
            assert not is_free(path)
    assert is_free(path)


def test_a_command_that_opened_the_file_before_it_was_deleted_takes_the_new_one(
    tmp_path, monkeypatch
):
    import fcntl

    path, original, calls = tmp_path / "folder" / "lock", fcntl.flock, []

    def flock(handle, operation):
        calls.append(handle)
        if len(calls) == 1:  # another command ends between opening and locking
            path.unlink()
            path.parent.rmdir()
        original(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(path):
        monkeypatch.undo()
        assert len(calls) == 2
        assert not is_free(path)


def test_a_process_that_forks_without_a_lock_keeps_its_children(tmp_path):
    code = (
        "import os, time\n"
        "import trl_packing.tools.prepare.folder_lock\n"
        "worker = os.fork()\n"
        "if not worker:\n"
        "    os.close(1)\n"
        "    time.sleep(600)\n"
        "print(worker)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    worker = int(done.stdout)
    assert is_running(worker)
    os.kill(worker, signal.SIGKILL)
