"""The plan of each way to share prefixes is that of a run with it."""

import html
import re

import numpy as np
import pytest
from datasets import Dataset
from helpers.runs import plan_page, plan_run, run_of_settings
from helpers.tiny import tiny_tokenizer

from trl_packing import PackedCollator


def previewed(rows, *settings):
    given = ["--max_length", "160", "--per_device_train_batch_size", "1", *settings]
    return run_of_settings(Dataset.from_list(rows), tiny_tokenizer(chat=True), given)


def answers():
    """Return prompts of 30 tokens with six answers each, shuffled."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(6, 90, (20, 30)).tolist()
    rows = [{"input_ids": prompts[n % 20] + [7 + n % 50] * 9} for n in range(120)]
    return [rows[n] for n in rng.permutation(120)]


STEPS = {
    "bins": [],
    "accumulated": ["--gradient_accumulation_steps", "3", "--per_device_train_batch_size", "2"],
}


@pytest.mark.parametrize("name", STEPS)
def test_each_way_is_the_plan_of_a_run_with_it(name):
    plan = plan_run(previewed(answers(), *STEPS[name]))
    assert [way.name for way in plan.sharing] == ["off", "bin", "group"]
    for way in plan.sharing:
        run = plan_run(previewed(answers(), *STEPS[name], "--prefix_sharing", way.name))
        assert way.steps == run.report.steps_per_epoch
        collate = PackedCollator(shares_prefixes=way.name != "off")
        rows = [run.documents.__getitems__(batch) for batch in run.epoch.members]
        sizes = [collate(row)["input_ids"].shape[1] for row in rows]
        assert (way.computed, way.largest) == (sum(sizes), max(sizes))
        assert way.prefixes_per_step == run.report.prefixes.per_step
        assert [other.name for other in run.sharing if other.is_run] == [way.name]
    off, shared, grouped = (way.computed for way in plan.sharing)
    assert grouped < 0.6 * off
    assert grouped < shared < off


@pytest.mark.parametrize("sharing", ["bin", "group"])
def test_the_page_shows_the_ways_and_strips_of_whole_documents(sharing):
    """Bins are filled by tokens that documents share, so those of groups show no free room."""
    plan = plan_run(previewed(answers(), "--prefix_sharing", sharing))
    page = plan_page(plan)
    is_group = sharing == "group"
    part = page[page.index("<h2>Shared prefixes") :]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", body, re.S)]
    expected = [(what_if.name, f"{what_if.computed:,}") for what_if in plan.sharing]
    assert [(row[0], row[3]) for row in cells] == expected
    assert str(plan.report.prefixes) in html.unescape(page)
    assert ("also where it shares tokens" in page) == is_group == ('class="free"' not in page)
    widths = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", page)
    assert all(float(left) + float(width) <= 100.01 for left, width in widths)
