"""The model card of a run says what was packed, lost and checked."""

from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq

from trl_packing import PackedSFTConfig, PackedSFTTrainer

ROWS = documents_of_lengths([20, 90, 8, 70] * 5)


def trained(folder: Path, rows=None, **options) -> PackedSFTTrainer:
    settings = {
        "max_length": 64,
        "max_steps": 2,
        "save_steps": 2,
        "per_device_train_batch_size": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    arguments = {"data_collator": options.pop("data_collator", None)}
    trainer = PackedSFTTrainer(
        tiny_model("llama"),
        PackedSFTConfig(str(folder), **(settings | options)),
        train_dataset=Dataset.from_list(ROWS) if rows is None else rows,
        processing_class=tiny_tokenizer(),
        **arguments,
    )
    trainer.train()
    return trainer


def card(trainer: PackedSFTTrainer) -> str:
    return (Path(trainer.args.output_dir) / "README.md").read_text()


def test_a_checkpoint_writes_the_card(tmp_path):
    trainer = trained(tmp_path)
    text = card(trainer)
    assert text.count("### Packing") == 1
    assert text.index("### Packing") < text.index("### Framework versions")
    bins = trainer.packing_report.bins
    assert f"20 documents (780 tokens) in {bins} rows of up to 64 tokens" in text
    assert "Preparation lost 160 tokens" in text
    assert "Checked before training: isolated: differs by" in text
    assert "─ trl_packing ─" in text
    tags = text.split("---")[1].split("tags:")[1]
    assert all(f"- {tag}\n" in tags for tag in ("trl", "sft", "trl-packing"))


@pytest.mark.parametrize("tags", [None, "math", ["math", "gsm8k"]])
def test_the_tag_is_added_to_those_of_the_user(tmp_path, tags):
    trainer = trained(tmp_path, save_strategy="no")
    trainer.create_model_card(model_name="m", dataset_name="d", tags=tags)
    given = [tags] if isinstance(tags, str) else tags or []
    assert all(f"- {tag}\n" in card(trainer) for tag in [*given, "trl-packing", "sft"])
    trainer.create_model_card(model_name="m", tags="trl-packing")
    assert card(trainer).count("- trl-packing\n") == card(trainer).count("### Packing") == 1


def test_the_card_of_a_stream_says_so(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    assert "on a stream of documents." in card(trained(tmp_path, stream))


def test_an_unchecked_run_says_so(tmp_path):
    text = card(trained(tmp_path, isolation_check="off"))
    assert "Checked before training: nothing (isolation_check='off')." in text


def test_a_run_on_trls_path_has_the_card_of_trl(tmp_path):
    collator = DataCollatorForSeq2Seq(tiny_tokenizer())
    text = card(trained(tmp_path, data_collator=collator))
    assert "- sft\n" in text
    assert "acking" not in text.replace(str(tmp_path), "")
