"""Prepared data are whole or not there, and an interrupted command continues."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.prepared import call_for, chats, text_or_end, text_or_wait
from helpers.tiny import tiny_dataset, tiny_iterable, tiny_tokenizer

from trl_packing import load_prepared
from trl_packing.formatting import tokenize_rows
from trl_packing.formatting.tokenized_parts import hash_of_rows
from trl_packing.tools.prepare import workplace
from trl_packing.tools.prepare.prepare_run import prepare_run
from trl_packing.tools.prepare.text import as_text


def content_of(folder):
    """Return the bytes of all shards, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.arrow"))}


@pytest.fixture
def tokenized(monkeypatch):
    """Return the first rows of the batches that are tokenized; the list can raise an error."""
    original, seen = tokenize_rows._prepare_batch, Stopping()

    def prepare_batch(batch, indices, first_row=0, **options):
        seen.append(first_row)
        return original(batch, indices, first_row=first_row, **options)

    monkeypatch.setattr(tokenize_rows, "_prepare_batch", prepare_batch)
    return seen


class Stopping(list):
    error, at = None, None

    def append(self, first_row):
        if self.error is not None and first_row == self.at:
            raise self.error
        super().append(first_row)


def test_an_interrupted_command_continues_with_the_parts_that_are_missing(tmp_path, tokenized):
    call, out = call_for(chats(24)), tmp_path / "out"
    tokenized.error, tokenized.at = KeyboardInterrupt(), 16
    with pytest.raises(KeyboardInterrupt):
        prepare_run(call, out, rows_of_a_part=8)
    assert tokenized == [0, 8]
    assert not out.exists()
    assert len([*(tmp_path / "out.partial" / "parts").rglob("*.arrow")]) == 2
    tokenized.error = None
    prepare_run(call, out, rows_of_a_part=8)
    assert tokenized == [0, 8, 16]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    prepare_run(call, tmp_path / "at once")
    assert content_of(out) == content_of(tmp_path / "at once")


def test_after_a_correction_only_its_part_is_made_again(tmp_path, tokenized):
    rows = chats(24).to_list()
    good = rows[17]["messages"]
    rows[17] = {"messages": [{"role": "user", "content": None}]}
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="row 17 of the train dataset"):
        prepare_run(call_for(Dataset.from_list(rows), train_on="assistant"), out, rows_of_a_part=8)
    assert not out.exists()
    rows[17] = {"messages": good}
    tokenized.clear()
    call = call_for(Dataset.from_list(rows), train_on="assistant")
    prepare_run(call, out, rows_of_a_part=8)
    assert tokenized == [16]
    prepare_run(call_for(chats(24), train_on="assistant"), tmp_path / "never bad")
    assert content_of(out) == content_of(tmp_path / "never bad")


def test_parts_of_other_settings_are_not_used(tmp_path, tokenized):
    tokenized.error, tokenized.at = KeyboardInterrupt(), 8
    with pytest.raises(KeyboardInterrupt):
        prepare_run(call_for(chats(24), train_on="all"), tmp_path / "out", rows_of_a_part=8)
    tokenized.error = None
    tokenized.clear()
    call = call_for(chats(24), train_on="assistant")
    prepare_run(call, tmp_path / "out", rows_of_a_part=8)
    assert tokenized == [0, 8, 16]
    prepare_run(call, tmp_path / "alone")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "alone")


def test_a_row_that_cannot_be_read_leaves_nothing_behind(tmp_path):
    rows = [*chats(2).to_list(), {"messages": [{"role": "user", "content": None}]}]
    with pytest.raises(ValueError, match="row 2 of the train dataset"):
        prepare_run(call_for(Dataset.from_list(rows), train_on="all"), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


@contextmanager
def files_end_at(size):
    """Make every write beyond `size` bytes of a file fail, as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_full_disk_leaves_no_folder_and_the_command_continues(tmp_path, size):
    call, out = call_for(chats(300), train_on="assistant"), tmp_path / "out"
    with files_end_at(size), pytest.raises(ValueError, match=r"out cannot be written: .*File too"):
        prepare_run(call, out, rows_of_a_part=100)
    assert not out.exists()
    assert not [*tmp_path.rglob("result")]
    prepare_run(call, out, rows_of_a_part=100)
    prepare_run(call, tmp_path / "at once")
    assert content_of(out) == content_of(tmp_path / "at once")


def test_the_limit_of_the_test_is_that_of_real_files(tmp_path):
    with files_end_at(10), pytest.raises(OSError) as error:
        (tmp_path / "file").write_bytes(b"0" * 20)
    assert error.value.errno == errno.EFBIG


def test_two_commands_do_not_write_one_folder(tmp_path):
    call, out = call_for(chats()), tmp_path / "out"
    work = workplace.Workplace(out, "key")
    with work.in_use():
        with pytest.raises(ValueError, match=r"another command is preparing .*out now"):
            prepare_run(call, out)
        assert work.parts.exists()
    prepare_run(call, out)


def test_the_same_command_again_changes_nothing(tmp_path, tokenized):
    call, out = call_for(chats()), tmp_path / "out"
    first = prepare_run(call, out)
    before = content_of(out)
    tokenized.clear()
    again = prepare_run(call, out)
    assert tokenized == []
    assert content_of(out) == before
    assert again.manifest == json.loads(json.dumps(first.manifest))
    assert "unchanged" in as_text(again)
    with pytest.raises(ValueError, match=r"other prepared data \(max_length=64 there and 32"):
        prepare_run(call_for(chats(), max_length=32), out)
    with pytest.raises(ValueError, match=r"other prepared data \(of other rows"):
        prepare_run(call_for(chats(23)), out)
    assert content_of(out) == before


def test_another_formatting_function_is_noticed(tmp_path, tokenized):
    rows = Dataset.from_list([{"a": f"Row {i}"} for i in range(9)])
    first = replace(call_for(rows), formatting_func=lambda row: row["a"])
    second = replace(call_for(rows), formatting_func=lambda row: row["a"] + "!")
    prepare_run(first, tmp_path / "out")
    prepare_run(first, tmp_path / "out")
    with pytest.raises(ValueError, match=r"other prepared data \(of other rows"):
        prepare_run(second, tmp_path / "out")
    tokenized.error, tokenized.at = KeyboardInterrupt(), 6
    with pytest.raises(KeyboardInterrupt):
        prepare_run(first, tmp_path / "second", rows_of_a_part=3)
    tokenized.error = None
    prepare_run(second, tmp_path / "second", rows_of_a_part=3)
    ends = [ids[-2] for ids in load_prepared(tmp_path / "second")["input_ids"]]
    assert set(ends) == {tiny_tokenizer()("!")["input_ids"][0]}


def test_a_place_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file; name a folder"):
        prepare_run(call_for(chats()), tmp_path / "file")
    with pytest.raises(ValueError, match="holds other files; name a new folder"):
        prepare_run(call_for(chats()), tmp_path)
    (tmp_path / "empty").mkdir()
    prepare_run(call_for(chats()), tmp_path / "empty")
    assert len(load_prepared(tmp_path / "empty")) == 24


def test_a_link_is_followed_and_a_disk_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prepare_run(call_for(chats()), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len(load_prepared(tmp_path / "link")) == 24
    monkeypatch.chdir(tmp_path / "real")
    assert prepare_run(call_for(chats()), Path(".")).seconds is None
    with pytest.raises(ValueError, match=r"^/ is a mounted disk and .* name a folder in it"):
        prepare_run(call_for(chats()), Path("/"))


@pytest.mark.slow
def test_a_process_that_was_killed_is_one_sentence_and_the_command_continues(tmp_path, monkeypatch):
    texts = [f"Row {i}" for i in range(60)]
    texts[45] = "end"
    rows, out = Dataset.from_dict({"text": texts}), tmp_path / "out"
    call = replace(call_for(rows, dataset_num_proc=2), formatting_func=text_or_end)
    monkeypatch.setenv("ENDS_WORKERS_OF", str(os.getpid()))
    with pytest.raises(ValueError, match=r"was killed, .* fewer processes \(dataset_num_proc=2\)"):
        prepare_run(call, out, rows_of_a_part=10)
    monkeypatch.delenv("ENDS_WORKERS_OF")
    assert len([*tmp_path.rglob("*.arrow")]) >= 4
    prepare_run(call, out, rows_of_a_part=10)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_evaluation_sets_are_prepared_by_the_rules_of_the_training_set(tmp_path):
    evaluated = {"a b": chats(5), "c/d": tiny_dataset("conversational_prompt_completion", 4)}
    prepare_run(call_for(chats(), evaluated), tmp_path / "out")
    assert len(load_prepared(tmp_path / "out", "a b")) == 5
    # The training set has no completions, so prompts are trained in all sets, as in TRL.
    labels = load_prepared(tmp_path / "out", "c/d")["labels"][:]
    assert all(-100 not in row for row in labels)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "a%20b",
        "c%2Fd",
        "manifest.json",
        "train",
    ]


REFUSED = {
    "a stream": (tiny_iterable(), {}, "is IterableDataset, which cannot be prepared"),
    "sources": (
        {"a": chats(), "b": chats()},
        {},
        "has the sources 'a', 'b'; prepare each by itself",
    ),
    "images": (Dataset.from_dict({"images": [[]], "text": ["a"]}), {}, "has images"),
    "no preparation": (
        tiny_dataset("tokenized"),
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        "skip_prepare_dataset=True leaves nothing to prepare",
    ),
    "generation marks": (chats(), {"assistant_only_loss": True}, "set train_on='assistant'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_cannot_be_prepared_are_refused(tmp_path, case):
    rows, changes, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        prepare_run(call_for(rows, **changes), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_prepared_data_are_not_prepared_again(tmp_path):
    prepare_run(call_for(chats()), tmp_path / "out")
    with pytest.raises(ValueError, match="the train dataset is prepared already"):
        prepare_run(call_for(load_prepared(tmp_path / "out")), tmp_path / "again")


def test_the_manifest_says_what_was_made_of_what(tmp_path):
    call = call_for(chats(), max_length=24)
    made = prepare_run(call, tmp_path / "out", options={"train_on": "all"})
    stored = made.manifest["sets"]["train"]
    documents = load_prepared(tmp_path / "out")
    assert stored["documents"] == len(documents)
    assert stored["tokens"] == sum(map(len, documents["input_ids"]))
    assert stored["data"]["hash"] == hash_of_rows(chats())
    assert stored["counts"]["stages"][0]["affected"] > 0
    assert {"trl_packing", "trl", "transformers", "tokenizers"} < set(made.manifest["versions"])
    assert made.manifest["options"] == {"train_on": "all"}


def test_the_hash_of_rows_depends_on_values_and_not_on_where_they_are():
    rows = chats(20)
    again = Dataset.from_list(rows.to_list() + chats(5).to_list()).select(range(20))
    assert hash_of_rows(again) == hash_of_rows(rows)
    other = rows.to_list()
    other[13]["messages"][0]["content"] += " "
    assert hash_of_rows(Dataset.from_list(other)) != hash_of_rows(rows)


@pytest.mark.slow
def test_processes_prepare_the_same_files(tmp_path):
    prepare_run(call_for(chats(60), train_on="assistant"), tmp_path / "one", rows_of_a_part=7)
    call = call_for(chats(60), train_on="assistant", dataset_num_proc=2)
    prepare_run(call, tmp_path / "two", rows_of_a_part=7)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


@pytest.mark.slow
def test_a_killed_process_leaves_parts_that_the_next_one_continues(tmp_path, tokenized):
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from helpers.prepared import call_for, chats\n"
        "from trl_packing.formatting import tokenize_rows\n"
        "from trl_packing.tools.prepare.prepare_run import prepare_run\n"
        "prepare_batch = tokenize_rows._prepare_batch\n"
        "def dies(batch, indices, first_row=0, **options):\n"
        "    if first_row == 200:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return prepare_batch(batch, indices, first_row=first_row, **options)\n"
        "tokenize_rows._prepare_batch = dies\n"
        f"prepare_run(call_for(chats(400)), Path({str(tmp_path / 'out')!r}), rows_of_a_part=100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len([*(tmp_path / "out.partial").rglob("*.arrow")]) == 2
    call = call_for(chats(400))
    prepare_run(call, tmp_path / "out", rows_of_a_part=100)
    assert tokenized == [200, 300]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    prepare_run(call, tmp_path / "at once")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "at once")


@pytest.mark.slow
def test_after_a_command_was_killed_its_workers_do_not_stop_the_next_one(tmp_path):
    texts = [f"Row {i}" for i in range(60)]
    texts[45] = "hold"  # in the last of three parts
    rows, out, hold = Dataset.from_dict({"text": texts}), tmp_path / "out", tmp_path / "hold"
    rows.save_to_disk(tmp_path / "rows")
    hold.mkdir()
    code = (
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from datasets import load_from_disk\n"
        "from helpers.prepared import call_for, text_or_wait\n"
        "from trl_packing.tools.prepare.prepare_run import prepare_run\n"
        f"call = call_for(load_from_disk({str(tmp_path / 'rows')!r}), dataset_num_proc=2)\n"
        "call = replace(call, formatting_func=text_or_wait)\n"
        f"prepare_run(call, Path({str(out)!r}), rows_of_a_part=10)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HOLD": str(hold)},
    )
    while running.poll() is None and not [*hold.iterdir()]:
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    worker = int(next(hold.iterdir()).name)  # waits, unless it has ended with the command
    assert not out.exists()
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("out.partial/**/*.arrow")}
    assert len(parts) >= 4
    call = replace(call_for(rows, dataset_num_proc=2), formatting_func=text_or_wait)
    try:
        prepare_run(call, out, rows_of_a_part=10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hold", "out", "rows"]
    prepare_run(call, tmp_path / "at once")
    assert content_of(out) == content_of(tmp_path / "at once")


def test_what_a_command_left_that_was_killed_at_its_very_end_is_deleted(tmp_path, tokenized):
    call, out = call_for(chats()), tmp_path / "out"
    prepare_run(call, out)
    before = content_of(out)
    rules = tmp_path / "out.partial" / "parts" / "key"
    rules.mkdir(parents=True)
    (rules / "part.arrow").write_bytes(b"half")
    tokenized.clear()
    assert prepare_run(call, out).seconds is None
    assert tokenized == []
    assert content_of(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_commands_at_once_make_one_folder(tmp_path, monkeypatch):
    """The second starts before the first has ended, and takes the lock after it."""
    call, out, original = call_for(chats()), tmp_path / "out", workplace.Workplace.in_use
    made = []

    def in_use(self):
        monkeypatch.undo()
        made.append(prepare_run(call, out))
        return original(self)

    monkeypatch.setattr(workplace.Workplace, "in_use", in_use)
    second = prepare_run(call, out)
    assert made[0].seconds is not None
    assert second.seconds is None
    assert second.manifest == json.loads(json.dumps(made[0].manifest))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
