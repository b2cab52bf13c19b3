"""The savings that the report names before a run are those that the run makes."""

import json

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.tools.plan.plan import PlannedEpoch
from trl_packing.training import prefix_sharing
from trl_packing.training.prefix_sharing import PrefixSavings, prefix_savings
from trl_packing.training.report import report_of
from trl_packing.training.sampling import Sampling


@pytest.fixture(autouse=True)
def sharing_is_asked_for(monkeypatch):
    """`prefix_sharing` is what a user set, and not the default, whichever that is."""
    monkeypatch.setattr("trl_packing.config.PackingOptions.prefix_sharing", "off")


def rows_with_prompts(number=60, *, length=40, seed=0, own_labels=False):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(6, 200, length).tolist() for _ in range(3)]
    rows = []
    for n in range(number):
        prompt = prompts[n % 3][: rng.integers(5, length)] if n % 4 else []
        answer = rng.integers(6, 200, rng.integers(2, 20)).tolist()
        labels = [-100] * len(prompt) + answer
        if own_labels and n % 5 == 0:
            labels[len(labels) // 2] = 3
        rows.append({"input_ids": prompt + answer, "labels": labels})
    return rows


def computed_by_collator(documents, sampler):
    collate = PackedCollator(shares_prefixes=True)
    rows = [documents.__getitems__(batch) for batch in sampler.micro_batches()]
    return sum(collate(row)["input_ids"].shape[1] for row in rows if row)


SAMPLERS = {
    "bins": {"capacity": 256, "bins_per_batch": 2, "num_ranks": 2, "accumulation": 2},
    "documents": {"documents_per_step": 20, "num_ranks": 2},
    # The last step has 3 documents for 4 ranks.
    "idle ranks": {"documents_per_step": 57, "num_ranks": 4, "allow_idle_ranks": True},
}


@pytest.mark.parametrize("own_labels", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_savings_are_those_of_the_collator_s_rows(name, own_labels):
    dataset = Dataset.from_list(rows_with_prompts(own_labels=own_labels))
    documents = ArrowDocuments(dataset, ["input_ids", "labels"])
    sampler = PackedBatchSampler(documents.lengths(), **SAMPLERS[name])
    found = prefix_savings(documents, sampler, "bin")
    assert found.is_whole
    assert found.tokens == documents.lengths().sum()
    assert found.computed == computed_by_collator(documents, sampler) < 0.9 * found.tokens


@pytest.mark.parametrize("name", SAMPLERS)
def test_groups_fill_bins_with_computed_tokens(name):
    dataset = Dataset.from_list(rows_with_prompts(own_labels=True))
    documents = ArrowDocuments(dataset, ["input_ids", "labels"])
    lengths = documents.lengths()
    groups = group_documents(PrefixIndex.of(documents), lengths, 256, 8)
    options = SAMPLERS[name]
    sampler = PackedBatchSampler(lengths, groups=groups, **options)
    found = prefix_savings(documents, sampler, "group")
    assert found.computed == computed_by_collator(documents, sampler)
    apart = PackedBatchSampler(lengths, **options)
    assert found.computed < prefix_savings(documents, apart, "group").computed
    # By hand: the groups of which a document is in each step.
    batches = [batch.tolist() for batch in sampler.micro_batches()]
    slots = sampler.num_ranks * sampler.accumulation
    steps = [batches[at : at + slots] for at in range(0, len(batches), slots)]
    per_step = [len({groups.numbers[d] for batch in step for d in batch}) for step in steps]
    assert found.per_step == sum(per_step) / len(per_step)
    assert str(found).endswith(f" · {found.per_step:.1f} prefixes a step")
    assert prefix_savings(documents, apart, "bin").per_step is None
    args = PackedSFTConfig("unused", max_length=256, use_cpu=True, bf16=False, report_to="none")
    columns = dataset.column_names
    report = report_of(
        Sampling(args, True), documents, sampler, columns=columns, prefix_sharing="group"
    )
    if name == "bins":
        assert report.tokens_computed == sampler.plan().tokens.sum() < lengths.sum()
        assert report.utilization == report.tokens_computed / (report.bins * 256) <= 1
    else:
        collate = PackedCollator(shares_prefixes=True)
        rows = [documents.__getitems__(batch) for batch in batches if batch]
        largest = max(collate(row)["input_ids"].shape[1] for row in rows)
        assert report.largest_micro_batch == largest
    assert PlannedEpoch(sampler).tokens.sum() == found.computed


def test_documents_of_packed_rows_share():
    rows = rows_with_prompts(30)
    packed = [
        {
            "input_ids": [x for row in rows[at : at + 5] for x in row["input_ids"]],
            "labels": [x for row in rows[at : at + 5] for x in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in rows[at : at + 5]],
        }
        for at in range(0, 30, 5)
    ]
    columns = ["input_ids", "labels", "seq_lengths"]
    documents = ArrowDocuments(Dataset.from_list(packed), columns)
    sampler = PackedBatchSampler(documents.lengths(), rows=True, bins_per_batch=2)
    found = prefix_savings(documents, sampler, "bin")
    assert found.computed == computed_by_collator(documents, sampler) < found.tokens


def test_a_large_data_set_is_estimated_from_a_part(monkeypatch):
    documents = ArrowDocuments(Dataset.from_list(rows_with_prompts(600)), ["input_ids"])
    sampler = PackedBatchSampler(documents.lengths(), 512)
    whole = prefix_savings(documents, sampler, "bin")
    monkeypatch.setattr(prefix_sharing, "_MOST_TOKENS", whole.tokens // 3)
    part = prefix_savings(documents, sampler, "bin")
    assert not part.is_whole
    assert 0.2 < part.tokens / whole.tokens < 0.5
    assert part.saved == pytest.approx(whole.saved, abs=0.05)
    assert str(part).startswith("about ")
    assert not str(whole).startswith("about ")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (PrefixSavings("bin", 2400, 1000, True), "2.4× fewer tokens computed"),
        (PrefixSavings("bin", 1130, 1000, False), "about 1.13× fewer tokens computed"),
        (
            PrefixSavings("off", 1130, 1000, True),
            "prefix_sharing='bin' would compute 1.13× fewer tokens",
        ),
        (PrefixSavings("off", 1010, 1000, True), ""),
        (PrefixSavings("bin", 1130, 1000, True, "it cannot"), "not shared: it cannot"),
        (PrefixSavings("bin", reason="it cannot"), "not shared: it cannot"),
        (PrefixSavings("bin"), ""),
        (
            PrefixSavings("bin", 1000, 1000, True, "it cannot"),
            "nothing to share: documents of a row begin differently",
        ),
    ],
)
def test_the_report_says_it_in_a_line(found, words):
    assert str(found) == words


def trainer_for(folder, rows, model="llama", **settings):
    defaults = {
        "max_length": 256,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PackedSFTTrainer(
        tiny_model(model) if isinstance(model, str) else model,
        PackedSFTConfig(str(folder), **(defaults | settings)),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )


def line(report):
    return dict(report.lines()).get("prefixes")


def test_the_report_s_savings_are_those_of_the_run(tmp_path):
    data = Dataset.from_list(rows_with_prompts(length=60))
    trainer = trainer_for(tmp_path, data, prefix_sharing="bin", pad_to_multiple_of=8)
    planned = trainer.packing_report.prefixes
    trainer.train()
    counts = trainer._meter.so_far()
    assert counts["tokens"] - counts["shared"] == planned.computed
    assert counts["shared"] > 0.1 * counts["tokens"]
    assert (
        line(trainer.packing_report)
        == f"{planned.tokens / planned.computed:.2f}× fewer tokens computed"
    )
    found = json.loads(trainer.packing_report.to_json())["prefixes"]
    assert (found["tokens"], found["computed"]) == (planned.tokens, planned.computed)


def test_a_run_that_does_not_share_names_the_setting(tmp_path):
    data = Dataset.from_list(rows_with_prompts(length=60))
    trainer = trainer_for(tmp_path, data, prefix_sharing="off")
    assert line(trainer.packing_report).startswith("prefix_sharing='bin' would compute 1.")
    apart = Dataset.from_list(documents_of_lengths([20] * 30))
    without = trainer_for(tmp_path, apart, prefix_sharing="off")
    assert line(without.packing_report) is None
    # A model that cannot share is not advised to.
    unable = trainer_for(tmp_path, data, attention="model", prefix_sharing="off")
    assert line(unable.packing_report) is None


def test_documents_without_common_prefixes_cost_no_check_and_no_look(tmp_path, monkeypatch):
    checks, check = [], prefix_sharing.check_prefixes

    def counted(*args, **kwargs):
        checks.append(args)
        return check(*args, **kwargs)

    monkeypatch.setattr(prefix_sharing, "check_prefixes", counted)
    rng = np.random.default_rng(0)
    data = Dataset.from_list([{"input_ids": rng.integers(6, 200, 30).tolist()} for _ in range(40)])
    trainer = trainer_for(tmp_path, data, prefix_sharing="bin")
    trainer.train()
    trainer.evaluate(data)
    assert not trainer.data_collator.shares_prefixes
    assert line(trainer.packing_report).startswith("nothing to share")
    assert not checks
    trainer_for(tmp_path, Dataset.from_list(rows_with_prompts()), prefix_sharing="bin").train()
    assert checks, "the control: with common prefixes the model is checked"


def test_an_evaluation_shares_where_training_does_not(tmp_path):
    rng = np.random.default_rng(0)
    data = Dataset.from_list([{"input_ids": rng.integers(6, 200, 30).tolist()} for _ in range(40)])
    trainer = trainer_for(tmp_path, data, prefix_sharing="bin")
    trainer.train()
    alike = Dataset.from_list(rows_with_prompts(length=60))
    batches = list(trainer.get_eval_dataloader(alike))
    assert any("key_index" in batch for batch in batches)
    assert not trainer.data_collator.shares_prefixes


def test_a_stream_is_reported_when_it_was_trained(tmp_path, capsys):
    rows = rows_with_prompts(length=60)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = trainer_for(tmp_path, stream, prefix_sharing="bin", max_steps=4)
    assert line(trainer.packing_report) is None
    trainer.train()
    counts = trainer._meter.so_far()
    computed = counts["tokens"] - counts["shared"]
    assert trainer.packing_report.prefixes.computed == computed < counts["tokens"]
    assert capsys.readouterr().out.count("× fewer tokens computed") == 1


def test_the_default_warns_of_nothing(tmp_path, monkeypatch, caplog):
    """As the default, "bin" is a try: the report has the reason, and no warning is logged."""
    data = Dataset.from_list(rows_with_prompts(length=60))
    settings = {"prefix_sharing": "bin", "attention": "model"}
    trainer_for(tmp_path, data, **settings).train()
    assert "does nothing in this run" in caplog.text  # the control: here it was asked for
    caplog.clear()
    monkeypatch.setattr("trl_packing.config.PackingOptions.prefix_sharing", "bin")
    trainer = trainer_for(tmp_path, data, **settings)
    trainer.train()
    assert "does nothing" not in caplog.text
    assert line(trainer.packing_report).startswith("not shared: attention='model'")
    rng = np.random.default_rng(0)
    apart = [{"input_ids": rng.integers(6, 200, 30).tolist()} for _ in range(40)]
    trainer = trainer_for(tmp_path, Dataset.from_list(apart), prefix_sharing="bin")
    assert line(trainer.packing_report) is None
