"""The page of verdicts: every architecture is in it once, in its family, and the counts add up."""

import re
from pathlib import Path

from architectures.compatibility import Verdict
from architectures.image_step import WithImages
from architectures.page import (
    COMMON,
    FAMILIES,
    OTHERS,
    family_of,
    family_table,
    report,
    summary_table,
    table,
)
from architectures.shared_step import Sharing
from architectures.tiny_models import names, vision_names

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

SHARED = Sharing("exact", 1e-6, 3e-5)
APART = Sharing("apart", 1e-6, 3e-5, "attention='padded' | <one set>")
SPOILED = Sharing("differs", 0.3, 3e-5)
PACKED = WithImages("exact", "mask", 2e-6, 4e-5)
PADDED = WithImages("trl", reason="not packed for llama4 models")
MIXED = WithImages("differs", "documents", 0.2, 4e-5)

VERDICTS = [
    Verdict(
        "llama", "exact", "documents", 1e-7, 2e-7, 3e-6, 2e-5, "exact", 0.6, "", SHARED, PACKED
    ),
    Verdict(
        "llama4",
        *("exact", "padded", 1e-7, 2e-7, 3e-7, 2e-5),
        *("refuses (ValueError)", 1, "by 3", APART, PADDED),
    ),
    Verdict("mamba", "exact", "padded", 1e-7, 2e-7, 3e-7, 2e-5, "differs (4)", 1.0, "leaks by 4"),
    Verdict(
        "strange", "differs", "documents", 1, 1, 1, 2e-5, "differs (1)", 1.0, "", SPOILED, MIXED
    ),
    Verdict("gemma3n", "not built", reason="needs | <timm>"),
]


def test_the_page_counts_by_result():
    rows = dict(re.findall(r"^\| ([^|]+) \| (\S+ \| \S+) \|$", summary_table(VERDICTS), re.M))
    assert rows["exact in one row"] == "1 | 1"
    assert rows["exact as padded rows"] == "2 | –"
    assert rows["another loss, silently"] == "1 | 2"
    assert rows["refused with an error"] == "0 | 1"
    assert rows["shares prefixes exactly"] == "1 | –"
    assert rows["trains shared prefixes apart, exactly"] == "1 | –"
    assert rows["another loss with shared prefixes, silently"] == "1 | –"
    assert rows["packs images exactly"] == "1 | –"
    assert rows["takes the path of TRL with images"] == "1 | –"
    assert rows["another loss with images, silently"] == "1 | –"
    assert rows["not built"] == "1 | 1"
    assert rows["**all**"] == "5 | 5"


def test_families_name_what_runs_as_padded_rows():
    text = family_table(VERDICTS)
    assert "| Llama | 1 of 2 | `llama4` | 1 exact, 1 refused |" in text
    assert "| Recurrent and hybrid | 0 of 1 | `mamba` | 1 silently different |" in text
    assert f"| {OTHERS} | 0 of 1 |  | 1 silently different |" in text
    assert "Gemma" not in text  # not built


def test_numbers_and_reasons_are_folded_and_escaped():
    lines = table(VERDICTS).splitlines()
    assert len(lines) == 2 + len(VERDICTS)
    cells = "| `llama` | one row, `documents` | exact | exact, `mask` | exact | <details>"
    assert lines[3].startswith(f"{cells}<summary>within 3e-06")
    assert "; shared prefixes 1e-06, rounding explains 3e-05; with images 2e-06, " in lines[3]
    assert r"padded rows, `padded` | attention='padded' \| &lt;one set> | TRL's path |" in lines[4]
    assert " by 3. With images: not packed for llama4 models.</details>" in lines[4]
    assert "| **differs** by 3e-01 | **differs** by 2e-01 | **differs** by 1 |" in lines[6]
    assert (
        "|  |  | **differs** by 4 | <details><summary>within 3e-07</summary>logits 1e-07"
        in lines[5]
    )
    assert lines[2].endswith(r"<details><summary>reason</summary>needs \| &lt;timm></details> |")


def test_the_page_says_so_if_trl_packs_a_model_that_is_padded_here():
    assert "No architecture that TRL packs exactly" in report(VERDICTS)
    lost = Verdict("opt", "exact", "padded", 0, 0, 0, 1e-5, "exact")
    assert "but as padded rows here: `opt`." in report([*VERDICTS, lost])


def test_every_beginning_of_a_family_is_that_of_an_architecture():
    known = [*names(), *vision_names()]
    for family, beginnings in FAMILIES.items():
        for begin in beginnings:
            assert any(family_of(n) == family and n.startswith(begin) for n in known), begin


def test_the_stored_page_holds_every_architecture_once_and_its_counts_add_up():
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|,]+?)(?:,[^|]+)? \| ", page, re.M)
    stored = [name for name, _ in rows]
    assert len(set(stored)) == len(stored) > 250
    shared = re.findall(r"^\| `[^`]+` \| [^|]+ \| exact \| ", page, re.M)
    ten = re.search(r"## Ten that people train\n\n(.+?)\n\n", page, re.S).group(1)
    assert len(COMMON) == ten.count("\n| ") - 1 == 10
    for name, here, trl in re.findall(r"\| `(\w+)` \| (.+?) \| (.+?) \|", ten):
        assert re.search(rf"^\| `{name}` \| {here} \|.*\| {re.escape(trl)} \|", page, re.M)
    counted = {
        "shares prefixes exactly": len(shared),
        "packs images exactly": len(re.findall(r"^\| .* \| exact, `\w+` \| ", page, re.M)),
        "exact in one row": sum(here == "one row" for _, here in rows),
        "exact as padded rows": sum(here == "padded rows" for _, here in rows),
        "not built": sum(here == "not built" for _, here in rows),
        "**all**": len(rows),
    }
    for result, count in counted.items():
        assert f"| {result} | {count} |" in page
