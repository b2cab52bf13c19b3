"""Faults written by hand, and the tests that must find each: run it by hand, not in CI.

    python tests/mutations.py                 all, in a temporary copy: about ten seconds each
    python tests/mutations.py resume epoch    those of some areas
    python tests/mutations.py 7 12            those with these numbers

A mutation replaces a pattern of syntax in one function, so that neither its format nor its place
matters. It is found if a test of its area fails. Exits with 1 if one is not found, or if its
pattern is not in its function exactly once.
"""

import ast
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: What takes long to import and is no part of the package.
INHERITED = (
    *("datasets", "hypothesis", "peft", "torch._dynamo", "trl.trainer.sft_trainer"),
    *(f"transformers.models.{m}.modeling_{m}" for m in ("llama", "gemma2", "gemma3", "gpt_oss")),
)
#: area -> modules of tests, the quickest first
TESTS = {
    "masks": "attention/test_document_sdpa documents/test_boundaries attention/test_prefix_keys "
    "attention/test_padded_rows test_oracle",
    "boundaries": "packing/test_prefix_tree packing/test_collator packing/test_prefix_index "
    "test_oracle",
    "positions": "documents/test_boundaries packing/test_prefix_tree test_oracle",
    "weights": "test_oracle documents/test_weights loss/test_step_loss loss/test_lm_head",
    "epoch": "packing/test_sampler packing/test_bins packing/test_document_order",
    "resume": "training/test_resuming",
    "streams": "run/test_stream_reader run/test_stream_loader",
}
#: An area, a file below trl_packing; a function, a pattern in it and its replacement, in which a
#: capital letter stands for any expression.
_TABLE = """\
masks documents/boundaries.py
  mask_from_document_ids | distance >= 0 | distance >= -1
  mask_from_document_ids | distance.abs() < window | distance.abs() <= window
  mask_from_document_ids | ids.unsqueeze(-1) == A | ids.unsqueeze(-1) >= A
masks attention/document_sdpa.py
  visible_keys | keys <= queries | keys <= queries + 1
  cut_tiles | q0 + past - window + 1 | q0 + past - window + 2
  visible_keys | keys > queries - A | keys >= queries - A
  _prefix_tiles | k1 + gap + window - 1 | k1 + gap
  _backward_op | part.sum(1) if A else B | B
  _backward_op | d_query[rows].add_(dq) if A else B | B
  _forward_op | lse = add_sinks(A, lse, sinks) | _ = add_sinks(A, lse, sinks)
masks attention/padded_rows.py
  _joined_tensor | pad(A, (1, 0)) | pad(A, (0, 1))
  _joined_tensor | np.argsort(A) | np.sort(A)
boundaries packing/collator.py
  PackedCollator.__call__ | flat_labels[starts[A]] = B | flat_labels[:1] = B
  PackedCollator.__call__ | [A for row in rows for length in row if A] | [sum(row) for row in rows]
boundaries packing/prefix_index.py
  shared_depths | common - 1 | common
boundaries packing/prefix_tree.py
  build_prefix_tree | path[depth - 1] + 1 | path[depth - 1]
  PrefixTree.sum_targets | weights[A] = 0 | pass
  tree_of_row | labels != IGNORE_INDEX | False
positions documents/boundaries.py
  position_ids_from_lengths | A - starts | A
positions packing/prefix_tree.py
  build_prefix_tree | ranges(depths, A) | ranges(0 * depths, A)
weights documents/weights.py
  _POWER | 0.5 | 1.0
  weigh_tokens | np.where(A, 0.0, weights) | weights
weights loss/sums.py
  target_weights | weights[..., 1:] | weights[..., :-1]
weights loss/step_loss.py
  StepLoss.measure | torch.stack(A).sum() | torch.stack(A).mean()
  StepLoss._token_losses | A.exp().detach() | A.exp()
weights packing/prefix_tree.py
  share_prefixes | A if TOKEN_WEIGHTS in flat else counts | counts
weights loss/lm_head.py
  _weight_grads | grad - most | grad
  _logits | 1 - squashed**2 | 1 + 0 * squashed
epoch packing/sampler.py
  PackedBatchSampler.arranged_bins | (self.seed, self.epoch) | (self.seed, 0)
  PackedBatchSampler.__iter__ | range(self.rank, A, B) | range(0, A, B)
  PackedBatchSampler._bins_of | self.shuffle and A | False
  PackedBatchSampler._steps_of_documents | order[: self.num_used] | order
  PackedBatchSampler._steps_of_bins | [A, *last] | [A, *last[1:]]
epoch packing/epoch.py
  split_bins | bins[at][:half] | bins[at]
epoch packing/bins.py
  _best_fit_decreasing | bisect_left(A, length) | bisect_left(A, length - 1)
epoch packing/draw.py
  document_order | seed + epoch | seed
resume training/resuming.py
  ResumedEpochs.start | (A, record.steps) | (A, record.steps + 1)
  ResumedEpochs.begin_epoch | self._first_step -= A | pass
  ResumedEpochs.save | self._trained_in(steps) | self._trained_in(steps + 1)
streams run/stream.py
  Windows.__init__ | islice(A, skipped, None) | islice(A, max(skipped - 1, 0), None)
  PackedStream.__iter__ | taken > skipped | taken >= skipped
  _is_turn_of | number % num_ranks == rank | True
"""


def table() -> Iterator[list[str]]:
    """Yield the area, file, function, pattern and replacement of each."""
    at: list[str] = []
    for line in _TABLE.splitlines():
        if line.startswith(" "):
            yield at + line.strip().split(" | ")
        else:
            at = line.split()


def parsed(pattern: str) -> ast.AST:
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern: Any, found: Any, letters: dict[str, Any]) -> bool:
    """Return whether `found` is a pattern; `letters` gets what each letter stands for."""
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and pattern.id.isupper():
        letters[pattern.id] = found
        return True
    if type(pattern) is not type(found):
        return False
    if isinstance(pattern, list):
        pairs = zip(pattern, found, strict=False)
        return len(pattern) == len(found) and all(matches(p, f, letters) for p, f in pairs)
    if not isinstance(pattern, ast.AST):
        return pattern == found
    fields = [field for field in pattern._fields if field != "ctx"]
    return all(matches(getattr(pattern, f), getattr(found, f), letters) for f in fields)


class Replace(ast.NodeTransformer):
    """Replaces syntax that `old` matches; `count` says how often."""

    def __init__(self, old: str, new: str):
        self.old, self.new, self.count = parsed(old), new, 0

    def visit(self, node: ast.AST) -> Any:
        letters: dict[str, Any] = {}
        if not matches(self.old, node, letters):
            return self.generic_visit(node)
        self.count += 1
        texts = {letter: f"({ast.unparse(found)})" for letter, found in letters.items()}
        return parsed(re.sub(r"\b[A-Z]\b", lambda letter: texts[letter[0]], self.new))


def is_named(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == name
    return isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name


def mutated(source: str, name: str, old: str, new: str) -> str:
    """Return `source` with `new` for `old` in what has the qualified name.

    Raises:
        ValueError: if there is nothing of this name, or `old` is not in it exactly once.
    """
    tree = scope = ast.parse(source)
    for part in name.split("."):
        scope = next((n for n in ast.walk(scope) if is_named(n, part)), ast.Pass())
    replace = Replace(old, new)
    replace.generic_visit(scope)
    if replace.count != 1:
        raise ValueError(f"STALE: {old!r} is {replace.count} times in {name}")
    return ast.unparse(tree)


def copy_of_the_tree(folder: Path) -> Path:
    kept = ("trl_packing", "tests", "recipes", "pyproject.toml")
    for name in kept:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


def fails(tree: Path, tests: str) -> bool:
    """Return whether a test fails, module by module, in a child that inherits imports."""
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "tests")]
        quiet = os.open(tree / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:anyio"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(tree)]
        codes = (int(pytest.main([*options, f"tests/{test}.py"])) for test in tests.split())
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
        for number, (area, file, name, old, new) in enumerate(table(), start=1):
            if chosen and not {area, str(number)} & set(chosen):
                continue
            path = tree / "trl_packing" / file
            began = time.monotonic()
            text = path.read_text(encoding="utf-8")
            try:
                path.write_text(mutated(text, name, old, new), encoding="utf-8")
                outcome = "NOT FOUND"
                if fails(tree, TESTS[area]):
                    outcome = f"found by {first_failure(tree) or 'a crash'}"
            except ValueError as stale:
                outcome = str(stale)
            path.write_text(text, encoding="utf-8")
            missed += not outcome.startswith("found")
            seconds = time.monotonic() - began
            where = f"{number:2} {area:10} {file}, {name}: {old!r}"
            print(f"{where}: {outcome} ({seconds:.0f} s)", flush=True)
    print(f"{missed} not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
