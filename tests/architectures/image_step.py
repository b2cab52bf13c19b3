"""One optimizer step of a tiny vision-language model on documents with images.

    documents     [i i t t]  [i t t i i t]  [t t]     one, two and no images, of different sizes
    reference     each alone: TRL's collator, the untouched model
    packed        all in one row: `PackedSFTTrainer`

Loss and gradients must be equal. Gradients of the tower with its projector, and of the text model,
are compared apart, because those of one would hide a difference in the other.
"""

from typing import Any

from helpers.vision import image_dataset
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from architectures.tiny_models import NotBuilt
from architectures.tiny_processors import NAMES, tiny_processor
from architectures.tiny_step import Part, judge_one_row
from architectures.tiny_vision import image_names, tiny_vision_model
from trl_packing.vision.support import FAMILIES


def judge_images(name: str, **options: Any) -> Part:
    """Train one packed step of documents with images, and compare it with each of them alone.

    Args:
        name: of an architecture.
        options: options of `PackedSFTConfig`.
    """
    if name not in image_names():
        return Part()
    if name not in FAMILIES:
        reason = f"the data set has images, which are not packed for {name} models"
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
    collator = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    options = {"max_length": 4096, "tokenizer": processor} | options
    rows = image_dataset()
    parts = _parts(model)
    return judge_one_row(model, rows, lambda row: collator([row]), parts, **options)[1]


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
