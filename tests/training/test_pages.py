"""A page never replaces a file that is something else."""

import pytest

from trl_packing.training.page import check_can_write, page


def test_a_page_replaces_an_older_page_and_nothing_else(tmp_path):
    older, empty, data = (tmp_path / name for name in ("a.html", "b", "c.jsonl"))
    older.write_text(page("title", []))
    empty.touch()
    for file in (older, empty, tmp_path / "new.html"):
        check_can_write("--html", str(file))
    data.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"^--html .*c\.jsonl exists and is no page"):
        check_can_write("--html", str(data))


def test_a_place_where_no_file_can_be_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"^--html .* is a folder; name a file$"):
        check_can_write("--html", str(tmp_path))
    with pytest.raises(ValueError, match=r"^--html '' is a folder"):
        check_can_write("--html", "")
    with pytest.raises(ValueError, match="its folder does not exist; create it first"):
        check_can_write("--html", str(tmp_path / "none" / "a.html"))
