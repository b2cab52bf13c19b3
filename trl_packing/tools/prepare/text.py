"""The result of `trl-packing prepare` as text and as JSON.

train        7,473 rows → 7,473 documents · 1,600,284 tokens · 1,020,118 trained (64%)
written      prepared · 6.4 MB in 1 file · 3 s
train with   --dataset_name prepared and the same settings; others are refused
"""

from collections.abc import Iterator, Mapping
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

import yaml

from trl_packing.data.counts import quantity
from trl_packing.data.prepared import counts_from_json
from trl_packing.formatting.printable import escape_hidden
from trl_packing.tools.prepare.prepare_run import PreparedRun

_INDENT = 13


def as_text(made: PreparedRun) -> str:
    """Return the lines to print."""
    name = f"--dataset_name {made.folder}"
    last = _line("train with", f"{name} and the same settings; others are refused")
    return "\n".join([*_lines(made.manifest["sets"], made), last])


def sources_as_text(made: Mapping[str, PreparedRun], mixture: Any) -> str:
    """Return the lines to print for the sources of a mixture, with the entries that name them.

    Args:
        made: what is prepared, by source.
        mixture: the setting, whose shares become those of the entries.
    """
    lines = [
        line
        for name, each in made.items()
        for line in _lines({name: each.manifest["sets"]["train"]}, each)
    ]
    shares = mixture if isinstance(mixture, dict) else {}
    entries = [
        {"path": str(each.folder), "source": name, **shares.get(name, {})}
        for name, each in made.items()
    ]
    lines.append(_line("train with", "the same settings and, in place of the entries before:"))
    text = yaml.safe_dump({"datasets": entries}, sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + f"\n\n{text.rstrip()}"


def _lines(sets: Mapping[str, Any], made: PreparedRun) -> Iterator[str]:
    for name, stored in sets.items():
        share = stored["trained"] / stored["tokens"] if stored["tokens"] else 0
        yield _line(
            name,
            f"{quantity(stored['rows'], 'row')} → {quantity(stored['documents'], 'document')} · "
            f"{stored['tokens']:,} tokens · {stored['trained']:,} trained ({share:.0%})",
        )
        counts = counts_from_json(stored["counts"])
        for sentence in str(counts or "").splitlines():
            yield _line("", sentence)
    shards = [shard["bytes"] for stored in sets.values() for shard in stored["shards"]]
    size = f"{made.folder} · {_size(sum(shards))} in {quantity(len(shards), 'file')}"
    if made.seconds is None:
        yield _line("unchanged", f"{size}, of the same rows and settings")
    else:
        yield _line("written", f"{size} · {made.seconds:,.0f} s")


def _line(name: str, text: str) -> str:
    return fill(
        escape_hidden(text),
        min(get_terminal_size((80, 24)).columns, 100),
        initial_indent=f"{escape_hidden(name):<{_INDENT - 1}} ",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _size(number: int) -> str:
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min((len(str(number)) - 1) // 3, len(units) - 1)
    return f"{number} bytes" if power == 0 else f"{number / 1000**power:.1f} {units[power]}"


def as_json(made: PreparedRun) -> dict[str, Any]:
    """Return the folder, the seconds and the manifest."""
    return {"folder": str(made.folder), "seconds": made.seconds, **made.manifest}
