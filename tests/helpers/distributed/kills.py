"""Train, kill with SIGKILL again and again, resume each time, and compare with a run left alone.

    cd tests && python -m helpers.distributed.kills folder ranks kills kills_inside_a_save size

Each row is divided over `size` ranks.

Every attempt is forked from this process, which has imported everything, so that it starts at once.
Prints one line of JSON: the kills, how many left a half-written checkpoint, and whether the final
weights are those of the uninterrupted run, to the last bit.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from helpers.ports import free_port

LENGTHS = [3 + (i * 7) % 29 for i in range(90)]
SETTINGS = {"max_length": 32, "per_device_train_batch_size": 2, "num_train_epochs": 5}
SETTINGS |= {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
SETTINGS |= {"learning_rate": 0.02, "isolation_check": "off"}
STEP_SECONDS = 0.03  # so that there is a moment to be killed in


class Paced(TrainerCallback):
    """Leaves a byte at the start of every step for the parent to count, and gives it its time.

    After `steps` it waits to be killed: on a busy machine the parent is late.
    """

    def __init__(self, started: Path, steps: int | None):
        self.started, self.left = started, steps

    def on_step_begin(self, args, state, control, **kwargs):
        with self.started.open("a") as steps:
            steps.write(".")
        time.sleep(STEP_SECONDS)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                time.sleep(300)


def dies_in_save(number: int) -> None:
    """Kill this process in the middle of the `number`-th file that PyTorch saves from now on."""
    save = torch.save
    left = [number]

    def half(content, file, *args, **kwargs):
        left[0] -= 1
        if not left[0]:
            Path(file).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file, *args, **kwargs)

    torch.save = half


def train(
    folder: Path, ranks: int, started: Path, *, file_to_die_in: int | None, steps: int | None
) -> None:
    """Train to the end in this process, from the last whole checkpoint if there is one.

    file_to_die_in: as in `dies_in_save`; steps: as in `Paced`.
    """
    from harness import make_trainer

    from helpers.tiny import documents_of_lengths
    from trl_packing.training.checkpoints import last_whole_checkpoint

    torch.set_num_threads(1)
    trainer = make_trainer(
        folder / "run",
        documents_of_lengths(LENGTHS, prompt=2),
        callbacks=[Paced(started, steps)],
        **SETTINGS,
        gradient_accumulation_steps=2 // ranks,
    )
    if file_to_die_in is not None:
        dies_in_save(file_to_die_in)
    begun = last_whole_checkpoint(folder / "run")
    trainer.train(resume_from_checkpoint=begun is not None)
    if trainer.args.process_index == 0:
        torch.save(trainer.model.state_dict(), folder / "weights.pt")


def forked(
    folder: Path, ranks: int, file_to_die_in: int | None = None, steps: int | None = None
) -> tuple[list[int], Path]:
    """Start an attempt on every rank; return the processes and the file with a byte a step."""
    started = folder / "started"
    started.unlink(missing_ok=True)
    processes = []
    port = free_port()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            try:
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                if ranks > 1:
                    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ |= {k: str(v) for k, v in (names | address).items()}
                log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                file = file_to_die_in if rank == 0 else None
                train(folder, ranks, started, file_to_die_in=file, steps=steps)
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        processes.append(process)
    return processes, started


def finish(processes: list[int]) -> list[int]:
    """Wait for all; once one has died of a signal, kill the others. Return their exit statuses."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(processes):
        for process in processes:
            if process not in statuses:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = status
        if any(status != 0 for status in statuses.values()):
            for process in processes:
                if process not in statuses:
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[process] for process in processes]


def uninterrupted(folder: Path, ranks: int) -> dict:
    """Train to the end, and return the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    processes, _ = forked(folder, ranks)
    assert not any(finish(processes)), (folder / "log.0").read_text()[-3000:]
    return torch.load(folder / "weights.pt")


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    kills, in_saves = int(sys.argv[3]), int(sys.argv[4])
    SETTINGS["sequence_parallel_size"] = int(sys.argv[5])
    expected = uninterrupted(folder / "alone", ranks)
    random.seed(ranks)
    killed = folder / "killed"
    killed.mkdir()
    halves, done = 0, 0
    while done < kills:
        # Kills in a save come last: then there are checkpoints to fall back to.
        file = random.randint(1, 4) if kills - done <= in_saves else None
        # By steps, not by seconds: a busy machine would be killed in its first epoch for ever.
        steps = random.randint(6, 8)
        processes, started = forked(killed, ranks, file, steps + 2 if file is None else None)
        if file is None:
            bytes_to_wait_for = steps * ranks
            while not started.exists() or started.stat().st_size < bytes_to_wait_for:
                ended = os.waitid(os.P_PID, processes[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                assert ended is None, (killed / "log.0").read_text()[-3000:]
                time.sleep(0.005)
            time.sleep(random.uniform(0, 2 * STEP_SECONDS))
            for process in processes:
                os.kill(process, signal.SIGKILL)
        finish(processes)
        if (killed / "weights.pt").exists():
            break  # it came to its end before it could be killed
        done += 1
        halves += any((killed / "run").glob("checkpoint-*/being_written"))
    weights = uninterrupted(killed, ranks)
    same = all(torch.equal(weights[name], value) for name, value in expected.items())
    result = {"kills": done, "half_written": halves, "same_weights": same}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
