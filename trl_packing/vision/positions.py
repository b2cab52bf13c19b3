"""Positions of a document with images in time, height and width, by the model's own method."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn


class RopePositions:
    """Positions of a document in time, height and width, from a model's `get_rope_index`.

    Args:
        maker: the module that has `get_rope_index`, without its weights.
    """

    def __init__(self, maker: Any):
        self.maker = maker
        self.arguments = frozenset(inspect.signature(type(maker).get_rope_index).parameters)

    @classmethod
    def of(cls, model: nn.Module) -> "RopePositions | None":
        """Return the positions of `model`; None if it has one position for each token."""
        found = next((m for m in model.modules() if hasattr(type(m), "get_rope_index")), None)
        return None if found is None else cls(_without_weights(found))

    def of_document(self, ids: Tensor, types: Tensor, grids: Tensor) -> Tensor:
        """Return the positions of a document ``(4, 1, T)`` int64; the first row counts its tokens.

        Args:
            ids: its tokens ``(T,)``.
            types: 1 on image tokens, else 0, ``(T,)``.
            grids: time, height and width of each image in patches, ``(images, 3)``.
        """
        text = torch.arange(len(ids))[None, None]
        if not len(grids):
            return text.expand(4, 1, -1)
        given = {"mm_token_type_ids": types[None], "image_grid_thw": grids}
        given = {name: value for name, value in given.items() if name in self.arguments}
        positions, _ = self.maker.get_rope_index(ids[None], **given)
        return torch.cat([text, positions.to(text.dtype)])


def _without_weights(module: nn.Module) -> Any:
    """Return a copy of `module` that can be sent to workers: its config and methods only."""
    bare = copy.copy(module)
    plain = {name: value for name, value in vars(module).items() if not callable(value)}
    bare.__dict__ = plain | {"_modules": {}, "_parameters": {}, "_buffers": {}}
    return bare
