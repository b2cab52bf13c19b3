"""The first optimizer step of a packed run equals the same documents, one at a time.

The reference knows nothing of this project: each document goes through the untouched model alone,
as an ordinary batch; the losses are summed and divided by the trained tokens of the whole step.

Tolerances, float32: one pass rounds at 2**-24 = 6e-8 of a value; sums over at most 64 × 32 products
and 2 layers stay below 100 roundings of values of size 1, so 1e-5. Gradients are compared at 1e-5
of their own largest entry plus that. What a leak does is 4 to 5 orders of magnitude larger (the
negative control).
"""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers.combinations import combined, fast
from helpers.tiny import PACKED_MODELS, tiny_model, tiny_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.boundaries import boundaries_of_row

LAYOUTS = [(1, 4), (4, 1), (2, 2)]
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5


class GradientsBeforeStep(TrainerCallback):
    """Keep the gradients of the first optimizer step and stop."""

    def __init__(self):
        self.gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        control.should_training_stop = True


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
    """Return loss, gradients and documents of the first optimizer step of a packed run."""
    seen = GradientsBeforeStep()
    trainer = PackedSFTTrainer(
        build_model(name, lora),
        PackedSFTConfig(
            output_dir=str(tmp_path),
            max_length=40,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=False,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            router_aux_loss_coef=0.0 if "moe" in name or name == "gpt_oss" else None,
            **{"bf16": False, **options},
        ),
        train_dataset=documents(completion_only),
        processing_class=tiny_tokenizer(),
        callbacks=[seen],
        data_collator=collator,
    )
    sampler = trainer._get_train_sampler(trainer._remove_unused_columns(trainer.train_dataset))
    chosen = [i for batch in list(sampler)[:accumulation] for i in batch]
    assert trainer.attention.backend == "documents"
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, seen.gradients, [trainer.train_dataset[i] for i in chosen]


def one_at_a_time(name, lora, chosen):
    """Return loss and gradients of `chosen`, each document alone, averaged over trained tokens."""
    model = build_model(name, lora)
    model.train()
    num_trained = sum(label != -100 for d in chosen for label in d["labels"][1:])
    total = 0.0
    for document in chosen:
        ids, labels = (torch.tensor(document[key])[None] for key in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
        (loss / num_trained).backward()
        total += loss.item() / num_trained
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, reference):
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            ours[name],
            expected,
            rtol=0,
            atol=GRADIENT_TOLERANCE * (1 + scale),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    ("name", "lora", "layout", "completion_only"),
    combined(PACKED_MODELS, [False, True], LAYOUTS, [True, False]),
)
def test_first_step_equals_one_document_at_a_time(name, lora, layout, completion_only, tmp_path):
    batch_size, accumulation = layout
    loss, gradients, chosen = first_step(
        name, lora, completion_only, batch_size, accumulation, tmp_path
    )
    assert len(chosen) > batch_size * accumulation, "several documents share a bin"
    expected_loss, expected = one_at_a_time(name, lora, chosen)
    assert loss == pytest.approx(expected_loss, abs=LOSS_TOLERANCE)
    assert_same_gradients(gradients, expected)


class OneDocument(PackedCollator):
    """The classic leak: the row's boundaries say that it is one document."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        whole = boundaries_of_row(torch.tensor([batch["input_ids"].shape[1]]))
        return {**batch, **{name: value for name, value in whole.items() if name in batch}}


@pytest.mark.parametrize("name", fast(PACKED_MODELS, ("llama", "gemma2", "qwen3_moe")))
def test_a_row_that_says_it_is_one_document_fails_the_same_comparison(name, tmp_path):
    loss, gradients, chosen = first_step(
        name, False, True, 2, 2, tmp_path, collator=OneDocument(), isolation_check="off"
    )
    expected_loss, expected = one_at_a_time(name, False, chosen)
    assert abs(loss - expected_loss) > 100 * LOSS_TOLERANCE
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients, expected)


class MasksEverySecondTarget(PackedCollator):
    """A class of a user's own that changes which tokens are trained, behind ours."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        batch["labels"][:, ::2] = -100
        return batch


def test_what_a_collator_of_ones_own_masks_is_not_trained(tmp_path):
    """Nobody goes by what our collator has told the host of the row before."""
    loss, gradients, chosen = first_step(
        "llama",
        False,
        False,
        2,
        1,
        tmp_path,
        collator=MasksEverySecondTarget(),
        isolation_check="off",
    )
    whole, _ = one_at_a_time("llama", False, chosen)
    at = 0
    for document in chosen:
        places = enumerate(document["labels"], start=at)
        at += len(document["labels"])
        document["labels"] = [-100 if place % 2 == 0 else label for place, label in places]
    expected_loss, expected = one_at_a_time("llama", False, chosen)
    assert loss == pytest.approx(expected_loss, abs=LOSS_TOLERANCE)
    assert_same_gradients(gradients, expected)
    assert abs(loss - whole) > 100 * LOSS_TOLERANCE, "the control"


def test_bf16_step_is_as_close_as_bf16_allows(tmp_path):
    """bf16 keeps 8 bits: at most 16 roundings (8 products forward, 8 back) of the largest entry."""
    loss, gradients, chosen = first_step(
        "llama", False, True, 2, 2, tmp_path, bf16=True, use_cpu=True
    )
    expected_loss, expected = one_at_a_time("llama", False, chosen)
    assert loss == pytest.approx(expected_loss, rel=2**-8)
    for name, reference in expected.items():
        scale = reference.abs().max().item()
        torch.testing.assert_close(gradients[name], reference, rtol=0, atol=16 * 2**-8 * scale)
