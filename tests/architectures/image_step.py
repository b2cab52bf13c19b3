"""One optimizer step of a tiny vision-language model on documents with images.

    documents     [i i t t]  [i t t i i t]  [t t]     one, two and no images, of different sizes
    reference     each alone: TRL's collator, the untouched model
    packed        all in one row: `PackedSFTTrainer`

Loss and gradients must be equal. Gradients of the tower with its projector, and of the text model,
are compared apart, because those of one would hide a difference in the other.
"""

import copy
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from architectures.tiny_models import NotBuilt
from architectures.tiny_processors import NAMES, tiny_processor
from architectures.tiny_step import LEAST_TOLERANCE, MOST_TOLERANCE, Part, train_step
from architectures.tiny_vision import image_names, image_rows, tiny_vision_model
from trl_packing.isolation.check import NOISE_FACTOR, round_differently
from trl_packing.vision.support import why_no_family


class _Step(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def judge_images(name: str, **options: Any) -> Part:
    """Train one packed step of documents with images, and compare it with each of them alone.

    Args:
        name: of an architecture.
        options: options of `PackedSFTConfig`.
    """
    if name not in image_names():
        return Part()
    if reason := why_no_family(name):
        return Part("trl", reason=reason)
    if name not in NAMES:
        return Part("not built", reason=f"{name} has no tiny processor")
    try:
        processor = tiny_processor(name)
        model = tiny_vision_model(name, processor)
    except (NotBuilt, ImportError) as problem:
        return Part("not built", reason=str(problem))
    return compare_with_images(model, processor, **options)


def compare_with_images(model: Any, processor: Any, **options: Any) -> Part:
    """Return the result for a model and its processor; neither is changed."""
    rows = image_rows()
    reference = _one_at_a_time(model, processor, rows)
    rounded = copy.deepcopy(model)
    with round_differently(rounded):
        moved = _one_at_a_time(rounded, processor, rows)
    parts = _parts(model)
    noise = NOISE_FACTOR * _distance(moved, reference, parts)
    tolerance = min(max(LEAST_TOLERANCE, noise), MOST_TOLERANCE)
    one_row = {
        "max_length": 4096,
        "per_device_train_batch_size": len(rows),
        "gradient_accumulation_steps": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer, loss, gradients = train_step(
                copy.deepcopy(model),
                rows,
                folder,
                processing_class=processor,
                **{**one_row, **options},
            )
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
            first_line, *_ = str(refusal).splitlines() or [type(refusal).__name__]
            return Part("refused", tolerance=tolerance, reason=first_line)
    if reason := trainer._trl_path:
        return Part("trl", reason=reason)
    error = _distance(_Step(loss, gradients), reference, parts)
    choice = trainer.attention
    outcome = "exact" if error <= tolerance else "differs"
    return Part(outcome, error, tolerance, choice.reason, choice.backend)


def _one_at_a_time(model: Any, processor: Any, rows: Dataset) -> _Step:
    """Return the step of the untouched model, each document alone in TRL's padded batch."""
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    batches = [collate([row]) for row in rows]
    num_trained = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    loss, alone = 0.0, copy.deepcopy(model).train()
    for batch in batches:
        labels = batch.pop("labels")
        logits = alone(**batch, use_cache=False).logits[0, :-1].float()
        nll = F.cross_entropy(logits, labels[0, 1:], reduction="sum") / num_trained
        nll.backward()
        loss += nll.item()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return _Step(loss, gradients)


def _parts(model: Any) -> list[set[str]]:
    """Return the names of the parameters of the text model, and of tower and projector."""
    config = model.config.get_text_config()
    text = {"lm_head"} | {
        name
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and module.config is config
    }
    names = {name for name, _ in model.named_parameters()}
    of_text = {name for name in names if any(name.startswith(f"{part}.") for part in text)}
    if not of_text < names or len(of_text) == 1:
        raise RuntimeError(f"{type(model).__name__} has no text model beside its tower")
    return [of_text, names - of_text]


def _distance(found: _Step, expected: _Step, parts: Sequence[Iterable[str]]) -> float:
    """Return the largest relative difference of loss and gradients, of each part apart."""
    errors = [abs(found.loss - expected.loss) / abs(expected.loss)]
    for names in parts:
        pairs = [(found.gradients.get(n), expected.gradients.get(n)) for n in names]
        size = max((float(right.abs().max()) for _, right in pairs if right is not None), default=0)
        if not size:
            raise RuntimeError("no gradient reaches the tower, or the text model")
        errors += [_difference(*pair) / size for pair in pairs]
    return max(errors)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference of two gradients; None is zero."""
    if found is None and expected is None:
        return 0.0
    zero = torch.zeros(())
    difference = (zero if found is None else found) - (zero if expected is None else expected)
    return float(difference.abs().max())
