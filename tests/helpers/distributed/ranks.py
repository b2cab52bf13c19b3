"""Run a function on several gloo ranks: `on_ranks` in a test, this module as each rank."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
SECONDS = 900  # longest time of a group on a busy machine; one that takes longer hangs


def on_ranks(
    function: Callable[[Any], Any], cases: dict[str, Any], folder: Path, ranks: int = 2
) -> dict[str, list[Any]]:
    """Call `function` with one case after another in one group; return the results by rank.

    The function is one of a module, cases can be pickled. A group that hangs is killed, and the
    assertion shows the end of its output.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pickle").write_bytes(pickle.dumps((function, cases)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", "helpers.distributed.ranks", str(folder)]
    paths = {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | paths,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{ranks} ranks hang:\n{output[-4000:]}") from None
    assert process.returncode == 0, output[-4000:]
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)] for name in cases
    }


def _run(folder: Path) -> None:
    """Run all cases as one rank, and end at once: threads of gloo may abort a normal exit."""
    import torch
    import torch.distributed as dist

    function, cases = pickle.loads((folder / "cases.pickle").read_bytes())
    torch.set_num_threads(1)
    for name, case in cases.items():
        print(f"case {name}", flush=True)
        torch.manual_seed(0)
        torch.save(function(case), folder / f"{name}.{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
