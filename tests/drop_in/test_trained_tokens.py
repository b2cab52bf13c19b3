"""The tokens that are trained are those of TRL: completion, assistant turns, given labels."""

from pathlib import Path

import pytest
import trl
from datasets import Dataset
from helpers.drop_in import (
    PackedSFTTrainer,
    both_modes,
    documents,
    train_moves_all,
    trained_text,
    trainer_for,
)
from helpers.tiny import tiny_tokenizer
from trl import SFTTrainer


@pytest.mark.parametrize(
    ("form", "completion_only_loss", "trained"),
    [
        ("prompt_completion", None, "Beautiful.<eos>"),
        ("prompt_completion", True, "Beautiful.<eos>"),
        ("prompt_completion", False, "What is better than ugly? Beautiful.<eos>"),
        ("conversational_prompt_completion", None, "Beautiful.<|im_end|>\n"),
        ("tokenized_completion_mask", True, "Beautiful.<eos>"),
        ("tokenized_completion_mask", None, "What is better than ugly? Beautiful.<eos>"),
        ("tokenized_assistant_masks", None, "Beautiful.<eos>"),
        ("tokenized_labels", None, "Beautiful.<eos>"),
        ("tokenized_labels", False, "Beautiful.<eos>"),
    ],
)
@both_modes
def test_only_these_tokens_are_trained(tmp_path, form, completion_only_loss, trained, packing):
    trainer = trainer_for(
        tmp_path, form, completion_only_loss=completion_only_loss, packing=packing, max_length=500
    )
    if packing and PackedSFTTrainer is SFTTrainer:  # rows hold several documents
        assert trained in trained_text(trainer)
    else:
        assert trained_text(trainer, 0) == trained


def test_completion_starts_where_the_prompt_tokens_end_alike(tmp_path):
    """A token across the boundary belongs to the completion, as TRL has it."""
    rows = [{"prompt": "What is better th", "completion": "an ugly?"}]
    ours, theirs = (
        trainer_for(tmp_path, Dataset.from_list(rows), cls=c) for c in (None, SFTTrainer)
    )
    assert documents(ours.train_dataset) == documents(theirs.train_dataset)
    assert trained_text(ours, 0).endswith("ugly?<eos>")


@both_modes
def test_assistant_only_loss_trains_the_answers(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        "conversational_language_modeling",
        processing_class=tiny_tokenizer(chat="generation"),
        assistant_only_loss=True,
        packing=packing,
        max_length=128,
    )
    text = trained_text(trainer)
    assert "Beautiful.<|im_end|>" in text
    assert "Quite sure.<|im_end|>" in text
    assert "What is" not in text
    train_moves_all(trainer)


def test_assistant_only_loss_patches_a_template_that_trl_knows(tmp_path):
    """Qwen3's own template has no generation marks; TRL renders with one that has."""
    tokenizer = tiny_tokenizer(chat=True)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    trainer = trainer_for(
        tmp_path,
        "conversational_prompt_completion",
        processing_class=tokenizer,
        assistant_only_loss=True,
    )
    assert "generation" in trainer.chat_template
    assert "{% generation %}" not in trainer.processing_class.chat_template
    assert "Beautiful.<|im_end|>" in trained_text(trainer, 0)
    assert "ugly" not in trained_text(trainer, 0)
