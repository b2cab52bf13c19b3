"""Read the run in a folder, of this trainer or another one.

run.json              a record of ours: everything is known
trainer_state.json    of any Trainer: log and steps; tokens where TRL logged num_tokens
"""

import json
from pathlib import Path
from typing import Any

from trl_packing.training.run_page import FILE, RunRecord, Totals, is_number

# `transformers.trainer.TRAINER_STATE_NAME` and `PREFIX_CHECKPOINT_DIR`, whose import takes seconds.
STATE = "trainer_state.json"
CHECKPOINT = "checkpoint"


def load_run(given: str) -> RunRecord:
    """Return the run in `given`: an output folder, a checkpoint, or one of the two files.

    Raises:
        ValueError: there is no run, or its file cannot be read.
    """
    path = Path(given)
    if not path.exists():
        raise ValueError(f"{given} does not exist (looked from {Path.cwd()})")
    file = _file_of(path) if path.is_dir() else path
    if file is None:
        raise ValueError(
            f"{given} holds no run: neither {FILE} nor {STATE}, also not in a "
            "checkpoint; name the output_dir of a run"
        )
    try:
        text = file.read_text(encoding="utf-8")
        record = RunRecord.from_json(text) if _is_ours(text) else run_of_state(json.loads(text))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{file} cannot be read as a run: {problem}") from problem
    record.name = given
    return record


def run_of_state(state: Any) -> RunRecord:
    """Return the run of a `trainer_state.json`, which another trainer may have written.

    Raises:
        ValueError: it is another file.
    """
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError("it has no log_history")
    log = [entry for entry in state["log_history"] if isinstance(entry, dict)]
    tokens, notes = _tokens_by_step(log)
    notes.append(
        f"read from {STATE}: documents, time, settings and versions are not recorded"
        + (" there; tokens are its num_tokens" if tokens else ", nor are tokens")
    )
    return RunRecord(
        name="",
        path="another trainer, or a run without run.json",
        log=log,
        totals={step: Totals(tokens=number) for step, number in tokens.items()},
        status="finished" if any("train_runtime" in entry for entry in log[-2:]) else "unknown",
        step=int(state.get("global_step", 0)),
        max_steps=int(state.get("max_steps", 0)),
        notes=notes,
    )


def _file_of(folder: Path) -> Path | None:
    """Return the file of a run in `folder`, or in its last checkpoint that has one."""
    checkpoints = sorted(folder.glob(f"{CHECKPOINT}-*"), key=_number, reverse=True)
    places = [folder, *checkpoints]
    found = [place / name for place in places for name in (FILE, STATE)]
    return next((path for path in found if path.is_file()), None)


def _number(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _is_ours(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found, dict) and "format" in found


def _tokens_by_step(log: list[dict[str, Any]]) -> tuple[dict[int, int], list[str]]:
    """Return the tokens that TRL counted up to each logged step, and notes about them."""
    tokens: dict[int, int] = {}
    for entry in log:
        number = entry.get("num_tokens", entry.get("eval_num_tokens"))
        if is_number(number) and is_number(entry.get("step")):
            tokens[int(entry["step"])] = int(number)
    in_order = [tokens[step] for step in sorted(tokens)]
    if in_order != sorted(in_order):
        return {}, ["num_tokens restarts within the log: TRL counts from 0 in a resumed run"]
    return tokens, []
