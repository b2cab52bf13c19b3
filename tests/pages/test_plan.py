"""The page of a plan shows the numbers of the report, and those of runs that are really planned."""

import html
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from harness import make_trainer
from helpers.browser import HOSTILE, open_page
from helpers.combinations import combined
from helpers.command import run_command
from helpers.runs import (
    Sampling,
    computed_tokens,
    flags_of,
    other_max_lengths,
    plan_page,
    plan_run,
    preview_epoch,
    run_of_settings,
    ways_to_batch,
)
from helpers.tiny import tiny_dataset, tiny_tokenizer
from trl import SFTTrainer


def texts(number=60, seed=0):
    """Return rows of 2 to 60 words, a few of them far longer."""
    sizes = np.random.default_rng(seed).integers(2, 60, number)
    sizes[::17] *= 5
    return Dataset.from_list([{"text": "one two three four " * (n // 4 + 1)} for n in sizes])


def completions(number=40):
    """Return prompts and completions; some completions would be cut away whole."""
    sizes = np.random.default_rng(1).integers(0, 7, (number, 2)).tolist()
    rows = [{"prompt": "why " * (p + 1), "completion": " so" * (c + 1)} for p, c in sizes]
    return Dataset.from_list(rows)


def tokenized():
    """Return token ids, some of them without a trained token."""
    sizes = np.random.default_rng(2).integers(1, 90, 50).tolist()
    ids = [[5 + i % 7 for i in range(n)] for n in sizes]
    masks = [[int(i > 3 and at % 9 > 0) for i in range(n)] for at, n in enumerate(sizes)]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def previewed(dataset, *settings, limit=24):
    words = ["--max_length", str(limit), *settings]
    return run_of_settings(dataset, tiny_tokenizer(chat=True), words)


SETTINGS = {
    "truncate": [],
    "from the start": ["--truncation_mode", "keep_end"],
    "prompt": ["--overflow", "truncate_prompt"],
    "drop": ["--overflow", "drop", "--packing_strategy", "greedy"],
    "split": ["--overflow", "split", "--per_device_train_batch_size", "2"],
    "wrapped": ["--packing_strategy", "wrapped"],
    "next fit": ["--packing_strategy", "next_fit", "--shuffle_dataset", "true"],
    "static": ["--static_shapes", "true", "--pad_to_multiple_of", "16"],
    "documents": ["--documents_per_step", "6", "--gradient_accumulation_steps", "2"],
    "unpacked": ["--packing", "false", "--shuffle_dataset", "true"],
    "unpacked, split": ["--packing", "false", "--overflow", "split"],
}
DATA = {"texts": texts, "completions": completions, "tokenized": tokenized}


def numbers_of(row):
    counts = row.counts.before, row.counts.after, row.counts.stages
    return row.bins, row.utilization, row.steps, row.documents_per_step, row.largest, *counts


def numbers_of_plan(plan):
    """Return the same numbers of the plan of a run."""
    report, counts = plan.report, plan.report.preparation
    sizes = computed_tokens(Sampling.before(plan.run, 2), plan.epoch.tokens)
    of_bins = report.bins, report.utilization if report.bins else None
    steps = report.steps_per_epoch, report.documents_per_step
    return *of_bins, *steps, int(sizes.max()), counts.before, counts.after, counts.stages


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("data", "name"), combined(DATA, SETTINGS))
def test_each_row_of_max_length_is_the_plan_of_a_run_with_it(data, name):
    dataset = DATA[data]()
    settings = SETTINGS[name]
    run = previewed(dataset, *settings)
    plan = plan_run(run, ranks=2)
    (own,) = [row for row in plan.what_if if row.max_length == 24]
    assert numbers_of(own) == numbers_of_plan(plan)
    whole = run.whole_documents()
    rows = list(other_max_lengths(whole, run.rules, Sampling.before(run, 2), [16, 40, 4096]))
    assert rows[0].steps > rows[-1].steps or rows[0].counts.stages
    for row in rows:
        other = plan_run(previewed(dataset, *settings, limit=row.max_length), ranks=2)
        assert numbers_of(row) == numbers_of_plan(other)
    assert plan.report == preview_epoch(run, ranks=2)


def test_a_max_length_that_the_run_refuses_has_no_row():
    error = plan_run(previewed(texts(), "--overflow", "error", limit=4096))
    assert [row.max_length for row in error.what_if] == [1024, 2048, 4096, 8192, 16384, 32768]


PADDED = [
    (1, {}),
    (4, {"pad_to_multiple_of": 8}),
    (3, {"dataloader_drop_last": True, "data_seed": 7}),
    (4, {"train_sampling_strategy": "group_by_length"}),
]


@pytest.mark.parametrize(("batch", "options"), PADDED)
def test_the_padded_run_computes_what_trl_computes(tmp_path, batch, options):
    dataset = texts(50)
    options = {"per_device_train_batch_size": batch, "max_length": 100, **options}
    tokenizer = tiny_tokenizer(chat=True)
    trainer = make_trainer(tmp_path, dataset, cls=SFTTrainer, tokenizer=tokenizer, **options)
    torch.manual_seed(trainer.args.seed)  # the state in which `train` reads the first batch
    batches = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    run = previewed(dataset, *flags_of(options), limit=100)
    plan = plan_run(run)
    way = plan.ways[0]
    if batch == 1:  # nobody pads batches of one document: the page names another size
        eight = way
        sampling = Sampling.before(run.with_settings(packing=False))
        facts = sampling.planned(plan.documents).facts
        way = ways_to_batch(plan.documents.lengths(), sampling, facts)[0]
        assert eight.name.startswith("padded in batches of 8, ")
        assert eight.padding > 0.2
        assert eight.steps == plan.report.padded_steps
    assert way.steps == len(batches)
    assert way.computed == sum(ids.numel() for ids in batches)
    assert way.padding > 0 or batch == 1


def test_the_ways_are_those_of_runs_with_these_settings():
    plan = plan_run(previewed(texts(), "--per_device_train_batch_size", "3"), ranks=2)
    padded, packed, fixed = plan.ways
    report = plan.report
    assert (padded.steps, packed.steps) == (report.padded_steps, report.steps_per_epoch)
    assert packed.is_run
    words = ["--per_device_train_batch_size", "3", "--documents_per_step", "6"]
    other = preview_epoch(previewed(texts(), *words), ranks=2)
    assert fixed.name == "documents_per_step=6"
    assert (fixed.steps, fixed.documents_per_step) == (other.steps_per_epoch, 6.0 * 10 / 10)
    assert packed.computed == fixed.computed == report.tokens
    static = plan_run(previewed(texts(), "--static_shapes", "true"))
    held, batches = static.report.tokens_per_micro_batch, static.report.micro_batches_per_epoch
    assert static.ways[1].computed == held * batches


def test_ranks_wait_for_the_costliest():
    plan = plan_run(previewed(texts(), "--gradient_accumulation_steps", "2"), ranks=3)
    costs = [sum(int(plan.documents.lengths()[d]) for d in m) for m in plan.epoch.members]
    slots = [costs[i : i + 3] for i in range(0, len(costs), 3)]
    waiting = 1 - sum(costs) / sum(3 * max(slot) for slot in slots)
    assert plan.epoch.waiting() == pytest.approx(waiting)
    (own,) = [row for row in plan.ranks if row.is_run]
    assert (own.steps, own.waiting) == (plan.report.steps_per_epoch, pytest.approx(waiting))


# --- the page -------------------------------------------------------------------------------------


def cells(page, heading):
    """Return the rows of the table under a heading, as texts."""
    part = page.split(f"<h2>{heading}")[1]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    rows = re.findall(r"<tr.*?</tr>", body, re.S)
    return [[html.unescape(c) for c in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def number(text):
    return float(text.split()[0].replace(",", "").replace("%", "").replace("−", "-"))


def test_the_numbers_of_the_page_are_those_of_the_report():
    settings = ["--overflow", "drop", "--per_device_train_batch_size", "3"]
    plan = plan_run(previewed(texts(), *settings, limit=140), ranks=2)
    report = plan.report
    counts = plan.report.preparation
    page = plan_page(plan)
    cards = dict(re.findall(r"<b>(.*?)</b><span>(.*?)</span>", page))
    figures = {f"{report.documents:,}", f"{report.tokens:,}", f"{report.utilization:.2%}"}
    assert figures <= cards.keys()
    assert f"padded: {report.padded_steps}" in cards[f"{report.steps_per_epoch}"]
    own = next(row for row in cells(page, "If max_length") if row[0] == "140")
    lost = counts.before.tokens - counts.after.tokens
    shown = [report.bins, round(100 * report.utilization, 2), counts.stages[0].affected, lost]
    shown += [report.steps_per_epoch, round(report.documents_per_step, 1)]
    assert [number(cell) for cell in own[1:7]] == shown
    stages = cells(page, "Kept and lost")
    assert [number(c) for c in stages[0][1:]] == [*vars(counts.before).values()]
    assert [number(c) for c in stages[-1][1:]] == [*vars(counts.after).values()]
    assert [-number(c) for c in stages[1][1:]] == [*vars(counts.stages[0].lost).values()]
    assert str(report) in html.unescape(page)
    assert "trained tokens · 2 ranks × 1 accumulated × 3 bins" in " ".join(str(report).split())


def test_rows_that_stay_as_they_are_and_a_run_without_limit_have_a_page():
    packed = Dataset.from_list([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}] * 6)
    plan = plan_run(previewed(packed))
    assert (plan.what_if, plan.ways, plan.whole) == ((), (), None)
    assert plan.lengths_before().tolist() == [3, 2] * 6
    skipped = previewed(tokenized(), "--dataset_kwargs", '{"skip_prepare_dataset":true}', limit=99)
    for page in (plan_page(plan), plan_page(plan_run(skipped))):
        assert "trained as they are" in page
    run = previewed(texts(), "--packing", "false")
    run.args.max_length = None
    plan = plan_run(run)
    assert plan.report.tokens == plan.lengths_before().sum()
    own = plan.what_if[-1]
    assert (own.max_length, own.is_run, own.steps) == (None, True, plan.report.steps_per_epoch)
    assert "no limit" in plan_page(plan)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_opens_without_errors_and_hostile_text_does_nothing(tmp_path, width, dark):
    rows = Dataset.from_list([{"text": text * 3} for text in HOSTILE])
    plan = plan_run(previewed(rows, limit=16))
    text = plan_page(plan, title=HOSTILE[0], note=HOSTILE[6], command="".join(HOSTILE))
    (tmp_path / "plan.html").write_text(text, encoding="utf-8")
    with open_page(tmp_path / "plan.html", width=width, dark=dark) as page:
        assert page.problems() == []
        assert "window.hostile = 1" in page.text(".documents")
        assert page.evaluate("document.querySelectorAll('svg').length") == 6
        assert page.evaluate("document.querySelector('.bar i').style.width")
    (tmp_path / "plan.html").write_text(html.unescape(text), encoding="utf-8")
    with open_page(tmp_path / "plan.html") as page:  # the negative control
        assert "hostile text acts" in page.problems()


def test_the_command_writes_a_page(tmp_path, capsys):
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    tiny_dataset("conversational_language_modeling").to_json(tmp_path / "data.jsonl")
    words = ["plan", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    page = tmp_path / "plan.html"
    assert run_command([*words, "--max_length", "64", "--ranks", "2", "--html", str(page)]) == 0
    said = capsys.readouterr()
    assert "documents    " in said.out
    assert f"wrote {page}" in said.err
    assert "Plan · data.jsonl" in page.read_text()
