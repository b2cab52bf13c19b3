"""Show the repository's files in the site, so that pages link to them as on GitHub.

`[step.md](../benchmarks/results/step.md)` works on GitHub and in an editor, but mkdocs only reads
docs/. This hook adds every file that a page links to under repository/, Markdown as a page and
others as text, and then the files that those link to. A broken link fails the strict build.

Recipes and notebooks are pages of their own, at recipes/ and notebooks/.
"""

import ast
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

import notebooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_CODE = re.compile(r"^(```|~~~).*?^\1\s*$|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=(?:#[^)\s]*)?\))")
_PAGES = ("recipes", "notebooks")  # folders whose files are pages like those of docs/
_SOURCE = "## Source { data-search-exclude }"
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", "": "make"}


def links(markdown: str) -> list[re.Match[str]]:
    """Return the targets of relative links outside code, without their anchors."""
    hidden = _CODE.sub(lambda code: " " * len(code[0]), markdown)
    return [m for m in _LINK.finditer(hidden) if not re.match(r"[a-z]+:|/", m[1])]


def page_of(path: Path) -> str:
    """Return the page, relative to docs/, that shows a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT)
    name = inside.as_posix() if inside.parts[0] in _PAGES else f"repository/{inside.as_posix()}"
    return name if path.suffix == ".md" else f"{name}.md"


def rewritten(markdown: str, source: Path) -> str:
    """Return the text of `source` with links to files of the repository as links to pages."""
    here = Path(page_of(source)).parent
    for link in reversed(links(markdown)):
        target = (source.parent / link[1]).resolve()
        if target.is_relative_to(ROOT) and target.exists():
            page = os.path.relpath(page_of(target), here) if is_shown(target) else link[1]
            markdown = markdown[: link.start()] + page + markdown[link.end() :]
    return markdown


def is_shown(path: Path) -> bool:
    """Return whether a file is a page. Pictures and other files inside docs/ are not."""
    return not path.is_relative_to(DOCS) or path.suffix == ".md"


def text_of(path: Path) -> str:
    """Return a page with the text of a file, or with the names in a folder."""
    if path.suffix == ".md":
        return rewritten(path.read_text(), path)
    if path.suffix == ".ipynb":
        return notebooks.markdown_of(path)
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith((".", "__")))
        return title + "\n".join(f"- `{name}`" for name in names)
    source = path.read_text()
    if path.suffix == ".py" and path.parent == ROOT / "recipes":
        tree = ast.parse(source)
        title = f"# {path.name}\n\n{ast.get_docstring(tree)}\n\n{_SOURCE}\n\n"
        source = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :]).lstrip()
    return f"{title}````{_LANGUAGES.get(path.suffix, 'text')}\n{source}\n````\n"


def linked_files() -> set[Path]:
    """Return the files outside docs/ that are pages, or that pages link to, however indirectly."""
    shown = [ROOT / "recipes" / "README.md", *(ROOT / "recipes").glob("*.py")]
    found = {*shown, *(ROOT / "notebooks").glob("*.ipynb")}
    waiting = [*DOCS.rglob("*.md"), shown[0]]
    while waiting:
        source = waiting.pop()
        for link in links(source.read_text()):
            target = (source.parent / link[1]).resolve()
            outside = target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
            if outside and target.exists() and target not in found:
                found.add(target)
                waiting += [target] if target.suffix == ".md" else []
    return found


def on_files(files, config):
    for path in sorted(linked_files()):
        files.append(File.generated(config, page_of(path), content=text_of(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = DOCS / page.file.src_uri
    return rewritten(markdown, source) if source.exists() else markdown
