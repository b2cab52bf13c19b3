"""The first optimizer step of a packed run equals the same documents, one at a time.

The reference and the bounds of rounding are those of `harness.py`, which knows nothing of this
project. What a leak does is 4 to 5 orders of magnitude larger (the negative control).
"""

import pytest
import torch
from datasets import Dataset
from harness import alone, assert_exact, run
from helpers.combinations import combined, fast
from helpers.tiny import PACKED_MODELS, tiny_model, tiny_tokenizer
from peft import LoraConfig, get_peft_model

from trl_packing import PackedCollator
from trl_packing.documents.boundaries import boundaries_of_row

LAYOUTS = [(1, 4), (4, 1), (2, 2)]


def documents(completion_only: bool) -> Dataset:
    """24 documents of 3 to 31 tokens; windows of 8 are shorter than most of them."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for number in range(24):
        length = 3 + (number * 13) % 29
        ids = torch.randint(6, 300, (length,), generator=generator).tolist()
        mask = [0 if completion_only and at < length // 3 else 1 for at in range(length)]
        rows.append(
            {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
        )
    return Dataset.from_list(rows)


def build_model(name: str, lora: bool):
    model = tiny_model(name)
    if not lora:
        return model
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if name == "gpt2":
        config.target_modules = ["c_attn", "c_proj"]
        config.fan_in_fan_out = True  # weights of its Conv1D are transposed
    return get_peft_model(model, config)


def first_step(
    name, lora, completion_only, batch_size, accumulation, tmp_path, collator=None, **options
):
    """Return the first optimizer step of a packed run, and the rows of its documents."""
    rows = documents(completion_only)
    found = run(
        build_model(name, lora),
        rows,
        tmp_path,
        arguments={"processing_class": tiny_tokenizer(), "data_collator": collator},
        max_length=40,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        router_aux_loss_coef=0.0 if "moe" in name or name == "gpt_oss" else None,
        **options,
    )
    assert found.trainer.attention.backend == "documents"
    by_ids = {tuple(row["input_ids"]): row for row in rows}
    if collator is None:
        return found, [by_ids[ids] for ids in found.documents()[0]]
    return found, rows_of_first_step(found.trainer, accumulation)


def rows_of_first_step(trainer, accumulation):
    """Return the rows of the first step by its sampler: a user's rows do not tell them."""
    sampler = trainer._get_train_sampler(trainer._remove_unused_columns(trainer.train_dataset))
    chosen = [i for batch in list(sampler)[:accumulation] for i in batch]
    return [trainer.train_dataset[i] for i in chosen]


@pytest.mark.parametrize(
    ("name", "lora", "layout", "completion_only"),
    combined(PACKED_MODELS, [False, True], LAYOUTS, [True, False]),
)
def test_first_step_equals_one_document_at_a_time(name, lora, layout, completion_only, tmp_path):
    batch_size, accumulation = layout
    found, chosen = first_step(name, lora, completion_only, batch_size, accumulation, tmp_path)
    assert len(chosen) > batch_size * accumulation, "several documents share a bin"
    assert_exact(found, alone(build_model(name, lora), chosen))


class OneDocument(PackedCollator):
    """The classic leak: the row's boundaries say that it is one document."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        whole = boundaries_of_row(torch.tensor([batch["input_ids"].shape[1]]))
        return {**batch, **{name: value for name, value in whole.items() if name in batch}}


@pytest.mark.parametrize("name", fast(PACKED_MODELS, ("llama", "gemma2", "qwen3_moe")))
def test_a_row_that_says_it_is_one_document_fails_the_same_comparison(name, tmp_path):
    found, chosen = first_step(
        name, False, True, 2, 2, tmp_path, collator=OneDocument(), isolation_check="off"
    )
    expected = alone(build_model(name, False), chosen)
    assert abs(found.losses[0] - expected[0]) > 20 * expected.bound_of_loss()
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_exact((expected[0], found.gradients), expected)


class MasksEverySecondTarget(PackedCollator):
    """A class of a user's own that changes which tokens are trained, behind ours."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        batch["labels"][:, ::2] = -100
        return batch


def test_what_a_collator_of_ones_own_masks_is_not_trained(tmp_path):
    """Nobody goes by what our collator has told the host of the row before."""
    collator, model = MasksEverySecondTarget(), build_model("llama", False)
    found, chosen = first_step(
        "llama", False, False, 2, 1, tmp_path, collator=collator, isolation_check="off"
    )
    with pytest.raises(AssertionError):  # the control
        assert_exact(found, alone(model, chosen))
    at = 0
    for document in chosen:
        places = enumerate(document["labels"], start=at)
        at += len(document["labels"])
        document["labels"] = [-100 if place % 2 == 0 else label for place, label in places]
    assert_exact(found, alone(model, chosen))


def test_bf16_step_is_as_close_as_bf16_allows(tmp_path):
    """bf16 keeps 8 bits: at most 16 roundings (8 products forward, 8 back) of the largest entry."""
    (loss, gradients), chosen = first_step("llama", False, True, 2, 2, tmp_path, bf16=True)
    expected_loss, expected = alone(build_model("llama", False), chosen)
    assert loss == pytest.approx(expected_loss, rel=2**-8)
    for name, reference in expected.items():
        scale = reference.abs().max().item()
        torch.testing.assert_close(gradients[name], reference, rtol=0, atol=16 * 2**-8 * scale)
