"""The tensors of images in a packed row: pixels in the order of the documents, and positions.

tokens of a document    [t t i i i i t]     image_grid_thw (1, 4, 4), or other inputs
position_ids             0 1 2 3 4 5 6      (4, 1, T): in the document,
                         0 1 2 2 2 2 4      in time,
                         0 1 2 2 3 3 4      height
                         0 1 2 3 2 3 4      and width
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from trl_packing.attention.model_facts import unwrap_peft
from trl_packing.attention.ranks import all_reduce_max
from trl_packing.documents.host_row import BOUNDARIES, host_row
from trl_packing.documents.labels import IMAGE_IDS, IMAGE_ROW, Document
from trl_packing.vision.images import ImageError, ImageStore
from trl_packing.vision.sizes import feature_id, gray_image, placeholder_token

if TYPE_CHECKING:  # only runs with images need Pillow
    from PIL import Image as PillowImage

Images = list["PillowImage.Image"]

_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


class ImageBatches:
    """Makes the tensors of images for packed rows of one model.

    Positions are those of each document alone; on the whole row, they would run on. Where ranks
    wait for each other in the tower, a row without images gets a blank one, whose gradients are 0.

    Args:
        store: the image files of the run.
        processor: of the model.
        model: its class makes positions and says which inputs it takes; PEFT may wrap it.
        fills_rows: add a blank image to rows without images.
    """

    def __init__(self, store: ImageStore, processor: Any, model: Any, *, fills_rows: bool = False):
        base = unwrap_peft(model)
        self.store = store
        self.processor = processor
        self.inputs = frozenset(inspect.signature(type(base).forward).parameters)
        maker = next((m for m in base.modules() if hasattr(type(m), "get_rope_index")), None)
        self.positions: Any = None if maker is None else _without_weights(maker)
        self.blank = blank_document(processor) if fills_rows else None

    def count(self, documents: Sequence[Document]) -> int:
        """Return the number of images of `documents`."""
        return sum(map(_num_images, documents))

    def blanks(self, documents: Sequence[Document]) -> list[Document]:
        """Return the blank document of a row of `documents` in a list; none if it needs none."""
        return [] if self.blank is None or self.count(documents) else [self.blank]

    def tensors(
        self, documents: Sequence[Document], input_ids: Sequence[np.ndarray]
    ) -> dict[str, Tensor]:
        """Return the inputs that a row of `documents` needs beside its tokens.

        Args:
            documents: with `image_row` and `image_ids`, or with `images` of their own; the blank
                one of `blanks` is the last of them.
            input_ids: the tokens of each document, and of padding behind them, ``(T,)`` each.

        Raises:
            ImageError: an image cannot be read, or needs another number of tokens than planned.
        """
        images = [self._images(document) for document in documents]
        pixels = self._pixels(documents, images)
        made = {name: value for name, value in pixels.items() if name in self.inputs}
        if self.positions is None and not self.inputs & {*_TOKEN_TYPES}:
            return made
        types_of = self.processor.create_mm_token_type_ids
        types = [torch.tensor(types_of([ids.tolist()])[0]) for ids in input_ids]
        made |= {name: torch.cat(types)[None] for name in _TOKEN_TYPES if name in self.inputs}
        if self.positions is not None:
            counts = [sum(map(len, rows)) for rows in images]
            counts += [0] * (len(types) - len(images))
            grids = pixels.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64)).split(counts)
            parts = zip(map(torch.from_numpy, input_ids), types, grids, strict=True)
            positions = [self._positions(*part) for part in parts if len(part[0])]
            made["position_ids"] = torch.cat(positions, dim=-1)
        return made

    def _images(self, document: Document) -> list[Images]:
        """Return the images of a document, by row of the user; rows without images are left out.

        A document of the isolation check brings its images, a list for each row that it is made of:
        some processors cut an image that is alone in its row into more tiles.
        """
        if "images" in document:
            return [list(row) for row in document["images"] if row]
        return [self.store.load(int(document[IMAGE_ROW]))] if _num_images(document) else []

    def _pixels(
        self, documents: Sequence[Document], images: Sequence[list[Images]]
    ) -> dict[str, Tensor]:
        """Return the output of the processor for the images of all documents.

        Raises ImageError naming documents, if it refuses one or makes other tokens than planned.
        """
        rows = [row for of_document in images for row in of_document]
        if not rows:
            return {}
        try:
            output = self.processor(
                images=rows,
                text=[placeholder_token(self.processor) * len(row) for row in rows],
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
            )
        except Exception as error:  # processors raise all kinds of errors
            pairs = zip(documents, images, strict=True)
            names = ", ".join(self._name(document) for document, found in pairs if found)
            raise ImageError(
                f"the processor refuses images of {names}: {error}; convert or remove it"
            ) from error
        feature = feature_id(self.processor)
        made = iter(output.pop("input_ids"))
        for document, of_document in zip(documents, images, strict=True):
            needed = sum(int((np.asarray(next(made)) == feature).sum()) for _ in of_document)
            given = int((np.asarray(document["input_ids"]) == feature).sum())
            if needed != given:
                raise ImageError(
                    f"{self._name(document)} has {given} image tokens, but its images need "
                    f"{needed} now; prepare the data again: its files or the processor changed"
                )
        return {k: v for k, v in output.items() if k not in ("attention_mask", *_TOKEN_TYPES)}

    def _name(self, document: Document) -> str:
        row = int(document.get(IMAGE_ROW, -1))  # documents of text may have no row with images
        return "a document" if row < 0 else self.store.name_of(row)

    def _positions(self, ids: Tensor, types: Tensor, grids: Tensor) -> Tensor:
        """Return the positions of a document ``(4, 1, T)`` int64; the first row counts its tokens.

        `types` are 1 on image tokens, else 0, ``(T,)``; `grids` are in patches, ``(images, 3)``.
        """
        text = torch.arange(len(ids))[None, None]
        if not len(grids):
            return text.expand(4, 1, -1)
        taken = inspect.signature(type(self.positions).get_rope_index).parameters
        given = {"mm_token_type_ids": types[None], "image_grid_thw": grids}
        given = {name: value for name, value in given.items() if name in taken}
        positions, _ = self.positions.get_rope_index(ids[None], **given)
        return torch.cat([text, positions.to(text.dtype)])


def _num_images(document: Document) -> int:
    if "images" in document:
        return sum(map(len, document["images"]))
    return int(np.max(document.get(IMAGE_IDS, ()), initial=0))


def _without_weights(module: nn.Module) -> Any:
    """Return a copy of `module` that can be sent to workers: its config and methods only."""
    bare = copy.copy(module)
    plain = {name: value for name, value in vars(module).items() if not callable(value)}
    bare.__dict__ = plain | {"_modules": {}, "_parameters": {}, "_buffers": {}}
    return bare


#: Heights and widths from which the image with the fewest tokens is chosen: some processors cut
#: wide images into fewer tiles.
_BLANKS = ((32, 32), (32, 128), (128, 32))


def ranks_wait_for_tower(trainer: Any) -> bool:
    """Return whether a rank that does not call the tower would stop the other ranks.

    They gather its parameters, or reduce its gradients, together. Raises ValueError if blank images
    would take part in the balance of experts.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    together = sharded or not trainer.args.ddp_find_unused_parameters  # TRL sets it for these
    waits = trainer.args.world_size > 1 and together
    if waits and trainer.aux_loss_enabled:
        raise ValueError(
            "rows without images get a blank one on several ranks, which would take part in the "
            "balance of experts; set router_aux_loss_coef=0.0"
        )
    return waits


def blank_document(processor: Any) -> Document:
    """Return a document that is one gray image: `input_ids`, and `images` of one row."""
    text = [placeholder_token(processor)]
    made: list[Document] = []
    for size in _BLANKS:
        images = [[gray_image(*size)]]
        output = processor(images=images, text=text, add_special_tokens=False)
        made.append({"input_ids": np.asarray(output["input_ids"][0], np.int64), "images": images})
    return min(made, key=lambda document: len(document["input_ids"]))


class StillTower(TrainerCallback):
    """Leaves the tower as it is in a step without images, as on one rank.

    Blank images give it gradients of zeros, for which optimizers decay weights and add momentum.
    One rank gives it none. DeepSpeed steps on gradients of its own, zeros on any number of ranks.
    """

    _sees_images = True

    def measure(self, batches: Iterable[Document]) -> None:
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


_DROPPED = frozenset(BOUNDARIES) - {"position_ids"}  # a tower may have positions of its own


def hide_boundaries(model: Any) -> None:
    """Call the vision towers of `model` without the boundaries of documents, from now on.

    transformers passes unknown arguments on to the tower, which would take them for its patches'.
    """
    base = unwrap_peft(model)
    config = getattr(base.config, "vision_config", None)
    for module in base.modules():
        if isinstance(module, PreTrainedModel) and module.config is config:
            module.register_forward_pre_hook(_drop_boundaries, with_kwargs=True)


def _drop_boundaries(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args, {name: value for name, value in kwargs.items() if name not in _DROPPED}
