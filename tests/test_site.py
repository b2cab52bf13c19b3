"""The site in a browser, opened from a folder as `make docs` leaves it.

Every page is shown at two widths. A page may not be wider than its window, cut a table or a block
of code, miss a picture, report an error or ask another host for anything.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.browser import open_page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

# Elements that reach beyond the window, or scroll inside, and pictures that are missing.
CUT = """[...document.querySelectorAll('article :is(table, pre, pre > code, svg, img, .output)')]
  .filter(e => e.getBoundingClientRect().width)
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1
    || e.matches('pre, code') && e.scrollWidth > e.clientWidth + 1
    || e.matches('img') && !e.naturalWidth)
  .map(e => `${e.tagName} ${e.textContent ? e.textContent.trim().slice(0, 60) : e.src}`)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install '.[docs]', or `make docs`")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


def pages(site: Path) -> list[Path]:
    """Return the pages of the navigation, without copies of source files."""
    found = [p for p in sorted(site.rglob("*.html")) if "repository" not in p.parts]
    return [p for p in found if p.name != "404.html" and not p.name.endswith(".yaml.html")]


@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_its_window_and_needs_no_other_host(site, width):
    wrong = {}
    own_file = f"request: {site.as_uri()}"
    for path in pages(site):
        with open_page(path, width=width) as page:
            found = [p for p in page.problems() if not p.startswith(own_file)]
            if found := found + page.evaluate(CUT):
                wrong[str(path.relative_to(site))] = found
    assert len(pages(site)) > 40
    assert wrong == {}
    assert "Return a plan in which every document" in (site / "api.html").read_text()
