"""Faults written by hand, and the tests that must find each: run it by hand, not in CI.

    python tests/mutations.py                 all, in a temporary copy: about ten seconds each
    python tests/mutations.py resume epoch    those of some areas
    python tests/mutations.py 7 12            those with these numbers

A mutation replaces one text of one file. It is found if a test of its area fails. Exits with 1 if
one is not found, or if its text is no longer in its file.
"""

import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What takes long to import and is no part of the package.
INHERITED = (
    *("datasets", "hypothesis", "peft", "torch._dynamo", "trl.trainer.sft_trainer"),
    *(f"transformers.models.{m}.modeling_{m}" for m in ("llama", "gemma2", "gemma3", "gpt_oss")),
)
ORACLE = ["tests/test_oracle.py"]
#: area -> tests, the quickest first
TESTS = {
    "masks": [
        *("tests/attention/test_document_sdpa.py", "tests/documents/test_boundaries.py"),
        *("tests/attention/test_prefix_keys.py", "tests/attention/test_padded_rows.py", *ORACLE),
    ],
    "boundaries": [
        *("tests/packing/test_prefix_tree.py", "tests/packing/test_collator.py"),
        *("tests/packing/test_prefix_index.py", *ORACLE),
    ],
    "positions": [
        *("tests/documents/test_boundaries.py", "tests/packing/test_prefix_tree.py", *ORACLE)
    ],
    "weights": [
        *(*ORACLE, "tests/documents/test_weights.py", "tests/loss/test_step_loss.py"),
        "tests/loss/test_lm_head.py",
    ],
    "epoch": [
        *("tests/packing/test_sampler.py", "tests/packing/test_bins.py"),
        "tests/packing/test_document_order.py",
    ],
    "resume": ["tests/training/test_resuming.py", "tests/training/test_resume.py"],
    "streams": ["tests/run/test_stream_reader.py", "tests/run/test_stream_loader.py"],
}
#: (area, file below trl_packing) -> texts and their replacements
MUTATIONS = {
    ("masks", "documents/boundaries.py"): [
        ("allowed &= distance >= 0", "allowed &= distance >= -1"),
        ("distance.abs() < window", "distance.abs() <= window"),
        ("ids.unsqueeze(-1) ==", "ids.unsqueeze(-1) >="),
    ],
    ("masks", "attention/document_sdpa.py"): [
        ("visible = keys <= queries", "visible = keys <= queries + 1"),
        ("q0 - window + 1)", "q0 - window + 2)"),
        ("keys > queries - opt", "keys >= queries - opt"),
        ("k1 + gap + window - 1)", "k1 + gap)"),
        ("part.sum(1) if part.shape[1] > 1 else ", ""),
        ("d_query[rows].add_(dq) if tile.merges else ", ""),
        ("        lse = with_sinks", "        pass"),
    ],
    ("masks", "attention/padded_rows.py"): [
        ("longest + 1 :], (1, 0))", "longest + 1 :], (0, 1))"),
        ("order = np.argsort(np", "order = np.sort(np"),
    ],
    ("boundaries", "packing/collator.py"): [
        ("flat_labels[starts[seq_lengths > 0]]", "flat_labels[:1]"),
        ("[length for row in rows for length in row if length]", "[sum(row) for row in rows]"),
    ],
    ("boundaries", "packing/prefix_index.py"): [
        ("_before, common, common - 1", "_before, common, common")
    ],
    ("boundaries", "packing/prefix_tree.py"): [
        ("path[depth - 1] + 1)", "path[depth - 1])"),
        ("np.diff(self.offsets) > 0]] = 0", "np.diff(self.offsets) > 0]] += 0"),
        ("if ((labels != IGNORE_INDEX) & (labels", "if (False & (labels"),
    ],
    ("positions", "documents/boundaries.py"): [
        ("device=starts.device) - starts", "device=starts.device)")
    ],
    ("positions", "packing/prefix_tree.py"): [
        ("position_ids=ranges(depths,", "position_ids=ranges(0 * depths,")
    ],
    ("weights", "documents/weights.py"): [
        ('"sqrt": 0.5}', '"sqrt": 1.0}'),
        ("labels == IGNORE_INDEX, 0.0,", "labels == IGNORE_INDEX, weights,"),
    ],
    ("weights", "loss/sums.py"): [("weights[..., 1:] * is", "weights[..., :-1] * is")],
    ("weights", "loss/step_loss.py"): [
        ("for w in of_batches]).sum()", "for w in of_batches]).mean()"),
        ("(-losses).exp().detach()", "(-losses).exp()"),
    ],
    ("weights", "packing/prefix_tree.py"): [
        ("if TOKEN_WEIGHTS in flat else counts", "if 0 else counts")
    ],
    ("weights", "loss/lm_head.py"): [
        ("grad = grad - most", "grad = grad + 0 * most"),
        ("(1 - squashed**2) * scale", "(1 + 0 * squashed) * scale"),
    ],
    ("epoch", "packing/sampler.py"): [
        ("default_rng((self.seed, self.epoch))", "default_rng((self.seed, 0))"),
        ("range(self.rank, len(drawn),", "range(0, len(drawn),"),
        ("is_new = self.shuffle and", "is_new = False and"),
        ("order = order[: self.num_used]", "order = order[:]"),
        ("bins.indices[chosen], *last]", "bins.indices[chosen], *last[1:]]"),
    ],
    ("epoch", "packing/epoch.py"): [("bins[at] = bins[at][:half]", "bins[at] = bins[at][:]")],
    ("epoch", "packing/bins.py"): [
        ("bisect_left(spaces, length)", "bisect_left(spaces, length - 1)")
    ],
    ("epoch", "packing/draw.py"): [("manual_seed(seed + epoch)", "manual_seed(seed)")],
    ("resume", "training/resuming.py"): [
        ("(record.epoch, record.steps)", "(record.epoch, record.steps + 1)"),
        ("self._first_step -= self._num_steps(skipped)", "pass"),
        ("trained = self._trained_in(steps)", "trained = self._trained_in(steps + 1)"),
    ],
    ("streams", "run/stream.py"): [
        ("islice(self._part, skipped, None)", "islice(self._part, max(skipped - 1, 0), None)"),
        ("if taken > skipped:", "if taken >= skipped:"),
        ("return number % num_ranks == rank", "return True"),
    ],
}


def copy_of_the_tree(folder: Path) -> Path:
    kept = ("trl_packing", "tests", "recipes", "pyproject.toml")
    for name in kept:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


def fails(tree: Path, tests: list[str]) -> bool:
    """Return whether a test fails, file by file, in a child that inherits imports."""
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "tests")]
        quiet = os.open(tree / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:anyio"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(tree)]
        codes = (int(pytest.main([*options, test])) for test in tests)
        os._exit(next(filter(None, codes), 0))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code < 3, (tree / "output.txt").read_text()[-3000:]
    return code != 0  # below 0: a crash


def first_failure(tree: Path) -> str:
    lines = (tree / "output.txt").read_text().splitlines()
    return next((x.split(" - ")[0] for x in lines if x.startswith(("FAILED", "ERROR"))), "")


def main(chosen: list[str]) -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.dont_write_bytecode = True
    for library in INHERITED:
        importlib.import_module(library)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        entries = [(*at, *texts) for at, pairs in MUTATIONS.items() for texts in pairs]
        for number, (area, name, old, new) in enumerate(entries, start=1):
            if chosen and not {area, str(number)} & set(chosen):
                continue
            path = tree / "trl_packing" / name
            began = time.monotonic()
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                outcome = f"STALE: the text is {text.count(old)} times in its file"
            else:
                path.write_text(text.replace(old, new), encoding="utf-8")
                found = fails(tree, TESTS[area])
                outcome = f"found by {first_failure(tree)}" if found else "NOT FOUND"
                path.write_text(text, encoding="utf-8")
            missed += not outcome.startswith("found")
            seconds = time.monotonic() - began
            print(
                f"{number:2} {area:10} {name}: {old.strip()!r}: {outcome} ({seconds:.0f} s)",
                flush=True,
            )
    print(f"{missed} not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
