"""A blank image for rows without images, on ranks that wait for each other in the tower.

    rank 0    [a a i i i a | b b]            an image of document a
    rank 1    [c c c | d d d d | i i]        a blank image, as a masked document behind the others

Ranks of FSDP and DeepSpeed gather the tower's parameters together, and reduce its gradients
together; so do ranks of DDP that do not look for unused parameters. All ranks must therefore call
the tower in each micro-batch. No token of a blank image is trained, so its gradients are zeros.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainerCallback

from trl_packing.attention.model_facts import unwrap_peft
from trl_packing.attention.state import all_reduce_max
from trl_packing.documents.host_row import host_row
from trl_packing.vision.placeholders import placeholder_token

#: Heights and widths from which the image with the fewest tokens is chosen: some processors cut
#: wide images into fewer tiles.
_SIZES = ((32, 32), (32, 128), (128, 32))


def ranks_wait_for_tower(trainer: Any) -> bool:
    """Return whether a rank that does not call the tower would stop the other ranks."""
    if trainer.args.world_size == 1:
        return False
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return True
    return not trainer.args.ddp_find_unused_parameters  # TRL sets it for vision-language models


def check_no_experts_are_balanced(trainer: Any) -> None:
    """Raise ValueError if blank images would take part in the balance of experts."""
    if trainer.aux_loss_enabled:
        raise ValueError(
            "rows without images get a blank one where ranks wait for each other, which would take "
            "part in the balance of experts; set router_aux_loss_coef=0.0"
        )


def blank_document(processor: Any) -> dict[str, Any]:
    """Return a document that is one gray image: `input_ids`, and `images` of one row."""
    from PIL import Image as PillowImage

    text, made = [placeholder_token(processor)], []
    for height, width in _SIZES:
        image = PillowImage.fromarray(np.full((height, width, 3), 127, np.uint8))
        output = processor(images=[[image]], text=text, add_special_tokens=False)
        ids = np.asarray(output["input_ids"][0], np.int64)
        made.append({"input_ids": ids, "images": [[image]]})
    return min(made, key=lambda document: len(document["input_ids"]))


class StillTower(TrainerCallback):
    """Leaves the tower as it is in a step without images, as on one rank.

    Blank images give it gradients of zeros, for which optimizers decay weights and add momentum.
    One rank gives it none. DeepSpeed steps on gradients of its own, zeros on any number of ranks.
    """

    def __init__(self) -> None:
        self._sees_images = True

    def measure(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Note whether any rank has an image in the micro-batches of a step."""
        rows = [host_row(batch) for batch in batches]
        found = any(row is None or row.num_images for row in rows)
        self._sees_images = bool(all_reduce_max(int(found)))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Remove the gradients of a step without images."""
        if not self._sees_images:
            for parameter in parameters_of_images(model):
                parameter.grad = None


def parameters_of_images(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a model that text does not use: of its tower and projector."""
    base = unwrap_peft(model)
    text = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
    of_text = {id(p) for module in text if module is not None for p in module.parameters()}
    return [p for p in base.parameters() if id(p) not in of_text]
