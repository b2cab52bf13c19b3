"""The documentation: links lead somewhere, messages and settings exist, numbers are those measured.

The strict build of mkdocs (tests/test_site.py) checks pages; what it does not see is checked here:
README and other files, files and tests that a page names, and everything quoted from the sources.
"""

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers import messages
from helpers.command import says

import trl_packing

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "hooks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "pictures"))

import draw
import draw_data
import hero
import public_names
import settings_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    """Return the Markdown files that a reader may open."""
    found = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
    return sorted([*found, *(ROOT / "benchmarks" / "results").glob("*.md")])


def without_code_blocks(markdown: str) -> str:
    return re.sub(r"^(```|~~~|````).*?^\1\s*$", "", markdown, flags=re.M | re.S)


# --- links ----------------------------------------------------------------------------------------


def slugs(markdown: str) -> set[str]:
    """Return the anchors of headings that both GitHub and mkdocs give."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", without_code_blocks(markdown), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*\\]", r"\1", heading)
        kept = re.sub(r"[^\w\s-]", "", text.lower()).strip()
        github, mkdocs = re.sub(r"\s", "-", kept), re.sub(r"[-\s]+", "-", kept)
        if github == mkdocs and kept.isascii():
            found.add(github)
    return found


def broken_links(path: Path) -> Iterator[str]:
    """Yield what is wrong with the links and the named files of a page."""
    text = without_code_blocks(path.read_text())
    prose = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            parts = urlsplit(target)
            if parts.scheme != "https" or "." not in parts.netloc:
                yield f"{target} is no https address"
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in slugs(file.read_text()):
            yield f"{target} has no such heading"
    for name in re.findall(r"`([\w./-]+/[\w./-]+(?:::\w+)?)`", text):
        yield from missing_file(name)


def missing_file(name: str) -> Iterator[str]:
    """Yield what is wrong with `tests/test_x.py::test_y`, if it looks like a file of ours."""
    file, _, test = name.partition("::")
    folder = file.split("/")[0]
    if folder not in ("trl_packing", "tests", "docs", "recipes", "benchmarks", "notebooks"):
        return
    if not (ROOT / file).exists() and not any(ROOT.glob(file)):
        yield f"`{file}` does not exist"
    elif test and f"def {test}(" not in (ROOT / file).read_text():
        yield f"`{name}`: there is no such test"


@pytest.mark.parametrize("path", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_named_files_exist(path):
    assert list(broken_links(path)) == []


# --- what is quoted from the sources --------------------------------------------------------------


def test_every_message_of_the_troubleshooting_page_is_in_the_sources():
    page = (DOCS / "troubleshooting.md").read_text()
    texts = [*messages.texts(), "x=… is bad"]
    rows = re.findall(r"^\| (`+) ?(.+?) ?\1 \| .+ \|$", page, re.M)
    quotes = [*(text for _, text in rows), "x=… is bad", "nothing says this"]
    assert len(quotes) > 50
    unsaid = [q for q in quotes if not any(messages.one_line(q) in text for text in texts)]
    assert unsaid == ["nothing says this"]


def test_the_table_of_settings_is_that_of_the_config():
    from trl import SFTConfig

    from trl_packing.config import PackedSFTConfig

    shown = settings_table.fields()
    inherited = {f.name: f for f in dataclasses.fields(SFTConfig)}
    fields = {f.name: f for f in dataclasses.fields(PackedSFTConfig)}
    ours = [n for n, f in fields.items() if inherited.get(n) is not f]
    assert [name for name, *_ in shown] == [n for n in fields if n in {s[0] for s in shown}]
    assert {name for name, *_ in shown} <= set(ours)
    assert {n for n in fields if n not in inherited} <= {name for name, *_ in shown}
    for name, _, default, words in shown:
        assert ast.literal_eval(default) == fields[name].default
        assert words == fields[name].metadata["help"]


# --- commands and code ----------------------------------------------------------------------------


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    fence = rf"^```{language}(?: [^\n]*)?\n(.*?)^```"
    return re.findall(fence, path.read_text(), re.M | re.S)


def code_of(path: Path) -> list[str]:
    """Return what a page writes as commands: its shell blocks and what stands in backticks."""
    inline = re.findall(r"`([^`]+)`", without_code_blocks(path.read_text()))
    return [*blocks(path, "bash"), *(code.replace("\n", " ") for code in inline)]


def unknown_commands(code: str) -> Iterator[str]:
    """Yield what does not exist of a command's targets, files, modules and options."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    code = code.replace("\\\n", " ")
    for target in re.findall(r"(?:^|\n)make ([a-z][\w-]*)", code):
        if target not in targets:
            yield f"make {target}"
    for file in re.findall(r"((?:benchmarks|recipes)/\w+\.(?:py|yaml))", code):
        if not (ROOT / file).exists():
            yield file
    for module in re.findall(r"-m (trl_packing[\w.]*)", code):
        if importlib.util.find_spec(module) is None:
            yield module
    for command, rest in re.findall(r"trl-packing (\w+)([^\n|#]*)", code):
        yield from (f"{command} {o}" for o in options_in(rest) - options_of(command))


def options_in(text: str) -> set[str]:
    return {option.replace("-", "_") for option in re.findall(r"--([a-z][\w-]*)", text)}


def options_of(command: str) -> set[str]:
    from trl_packing.cli.program import RUN, _parser
    from trl_packing.config import PackedSFTConfig

    (commands,) = (a.choices for a in _parser()._actions if a.dest == "command")
    if command not in commands:
        return set()
    named = [a.option_strings for a in commands[command]._actions]
    own = options_in(RUN) if command != "doctor" else set()
    own |= {s.lstrip("-").replace("-", "_") for strings in named for s in strings}
    fields = {f.name for f in dataclasses.fields(PackedSFTConfig)}
    return own | (fields if command != "doctor" else set())


@pytest.mark.parametrize("path", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_on_a_page_exist(path):
    if path.name == "LOG.md":
        return  # what was true on its day
    assert [u for code in code_of(path) for u in unknown_commands(code)] == []


@pytest.mark.parametrize("path", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_on_a_page_compiles_and_its_imports_exist(path):
    for block in blocks(path, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), block


def test_the_plan_of_the_quick_start_is_what_the_command_prints(capsys):
    page = DOCS / "index.md"
    (shown,) = blocks(page, "text")
    (command,) = [c for c in code_of(page) if c.startswith("--model recipes/demo")]
    options = [str(ROOT / o) if o.startswith("recipes/") else o for o in command.split()]
    printed = [line for line in says(capsys, "plan", *options).splitlines() if "───" not in line]
    assert shown.splitlines() == printed


def test_the_report_of_the_readme_is_that_of_the_demo(capsys):
    from trl_packing.isolation.check import IsolationReport
    from trl_packing.isolation.guard import Checked

    (shown,) = blocks(ROOT / "README.md", "text")
    *plan, attention, checked = shown.splitlines()
    printed = says(capsys, "plan", str(ROOT / "recipes" / "sft_packed.py")).splitlines()
    assert [line for line in printed if line in plan] == plan
    assert attention == "attention    document-wise SDPA (cpu, float32)"
    difference, allowed, leak = map(float, re.findall(r" (\d[\d.e-]*)", checked))
    measured = IsolationReport("isolated", difference, allowed / 4, leak, "", "", "", "")
    assert checked == f"checked      {Checked('isolated', '', measured)}"


# --- numbers --------------------------------------------------------------------------------------


def unmeasured(page: Path) -> list[str]:
    """Return the numbers of table rows that the file which the row links to does not hold."""
    missing = []
    for row in re.findall(r"^\|.+\|$", page.read_text(), re.M):
        file = re.search(r"\]\(([^)]*benchmarks/results/[^)]+)\)", row)
        if file is None:
            continue
        cells = [c.strip() for c in row.strip("|").split("|")]
        numbers = [c for c in cells if re.fullmatch(r"[\d.,]+×?", c)]
        held = (page.parent / file[1]).read_text()
        alone = r"(?<![\d.,]){}(?![\d.,]*\d)"
        missing += [n for n in numbers if not re.search(alone.format(re.escape(n)), held)]
    return missing


def test_numbers_of_ours_are_those_of_the_files_that_are_named(tmp_path):
    page = ROOT / "README.md"
    assert unmeasured(DOCS / "claims.md") == unmeasured(page) == []
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.md").write_text("| 1,234 | 5.6× |\n")
    (tmp_path / "b.md").write_text("| x | 234 | 5.6× | [a](benchmarks/results/a.md) |\n")
    assert unmeasured(tmp_path / "b.md") == ["234"], "the check sees what was not measured"


def test_the_readme_counts_architectures_as_the_matrix_does():
    matrix = (DOCS / "compatibility.md").read_text()
    counts = dict(re.findall(r"^\| ([a-z, ]+) \| (\d+ \| \S+) \|$", matrix, re.M))
    packed, exact = counts["exact in one row"].split(" | ")
    padded, _ = counts["exact as padded rows"].split(" | ")
    ours, silent = counts["another loss, silently"].split(" | ")
    _, refused = counts["refused with an error"].split(" | ")
    promise = " ".join((ROOT / "README.md").read_text().split())
    assert f"on all {int(packed) + int(padded)} architectures" in promise
    assert f"{packed} of them packed, {padded} as padded rows" in promise
    total = int(packed) + int(padded)
    by_trl = f"{exact} of the {total} are exact, {refused} raise an error, and {silent} silently"
    assert by_trl in promise
    assert ours == "0"


# --- the API --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trl_packing.__all__)
def test_public_docstrings_explain_every_parameter(name):
    thing = getattr(trl_packing, name)
    explained = inspect.signature(thing).parameters.values()
    settings = thing is trl_packing.PackedSFTConfig  # each field has its help
    named = {p.name for p in explained if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    text = inspect.getdoc(thing) or ""
    missing = {n for n in named if not re.search(rf"^    {n}:|`{n}`", text, re.M)}
    assert settings or missing == set()


def test_every_public_name_is_on_the_api_page():
    page = (DOCS / "api.md").read_text()
    named = r"^::: (trl_packing\.[\w.]*?)\.(\w+)$"
    shown = {name: home for home, name in re.findall(named, public_names.completed(page), re.M)}
    assert set(trl_packing.__all__) - set(shown) == set()
    for name, home in shown.items():
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
    without = page.replace("::: trl_packing.packing.bins.pack\n", "")
    assert "::: trl_packing.packing.bins.pack\n" in public_names.completed(without)


def test_pictures_are_what_their_scripts_draw(tmp_path, monkeypatch):
    table = draw.import_table()
    pictures = DOCS / "pictures"
    examples = list(draw_data.examples((DOCS / "data.md").read_text()))
    drawn = {DOCS / example.file: draw_data.draw(example) for example in examples}
    assert len(drawn) == len(examples) > 12
    monkeypatch.setattr(draw, "HERE", tmp_path)
    monkeypatch.setattr(hero, "HERE", tmp_path)
    drawings = (draw.draw_row, draw.draw_plan, draw.draw_step, draw.draw_tree)
    for make in (*drawings, draw.draw_recurrent, hero.draw_hero):
        make()
    draw.draw_imports(table)
    drawn |= {pictures / p.name: p.read_text() for p in tmp_path.glob("*.svg")}
    stored = {p: p.read_text() for p in [*pictures.glob("*.svg"), *pictures.glob("data/*.svg")]}
    assert drawn == stored, "run python docs/pictures/draw.py or draw_data.py"


def test_the_architecture_page_names_modules_that_exist_and_every_folder():
    page = (DOCS / "architecture.md").read_text()
    package = ROOT / "trl_packing"
    named = re.findall(r"(?<![\w/])(?!tests/)([a-z_]+/[a-z_]+\.py)", page)
    assert len(named) > 20
    assert [name for name in named if not (package / name).exists()] == []
    folders = {p.name for p in package.iterdir() if p.is_dir() and not p.name.startswith("__")}
    modules = {p.name for p in package.glob("[a-z]*.py")}
    shown = re.findall(r"^[├└]── ([\w.]+)", page, re.M)
    assert set(shown) == folders - {"recipes"} | modules


def test_the_way_of_a_row_names_at_most_40_functions_that_exist():
    files = {path.stem: path.read_text() for path in (ROOT / "trl_packing").rglob("*.py")}
    drawn = (DOCS / "architecture.md").read_text().partition("rows → documents ")[2]
    named = re.findall(r"(\w+) +(\w+)", drawn.partition("──\n")[2].partition("```")[0])
    assert 30 < len(named) <= 40
    assert [n for n in named if not re.search(rf"(def|class) {n[1]}\b", files[n[0]])] == []
