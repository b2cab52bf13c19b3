"""The packed row of the current step of a `transformers.Trainer`, read from its loop's variables.

    Trainer._run_epoch              for i, inputs in enumerate(batch_samples):
      training_step (any)               self.training_step(model, inputs, ...)
        compute_loss (any)                  model(inputs_embeds=embed(inputs["input_ids"]))
          the model                             row_in_flight(model)

transformers has no hook between the data loader and the methods that a subclass may override, and
rows may be collated in other processes. The model therefore searches its callers for the loop. No
row is in flight between two steps (callbacks, `compute_metrics`), nor in a user's loop.
"""

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from trl_packing.documents.host_row import host_boundaries
from trl_packing.recognition.packed_batch import lengths_of_row

_STEPS = ("training_step", "prediction_step")


class RowInFlight(NamedTuple):
    """A row of several documents: its tokens `ids` ``(T,)`` and their `boundaries` ``(N + 1,)``."""

    ids: np.ndarray
    boundaries: np.ndarray


def row_in_flight(model: nn.Module) -> RowInFlight | None:
    """Return the row of the caller's step, None if it does not have several documents."""
    batch = _batch_in_flight()
    ids = None if batch is None else batch.get("input_ids")
    if batch is None or not torch.is_tensor(ids) or ids.dim() != 2 or len(ids) != 1:
        return None
    boundaries = batch.get("cu_seq_lens_q")
    lengths = (
        np.diff(host_boundaries(boundaries))
        if torch.is_tensor(boundaries)
        else lengths_of_row(model, dict(batch))
    )
    if lengths is None or np.count_nonzero(lengths) < 2:
        return None
    row = ids[0].cpu().numpy().astype(np.int64)
    return RowInFlight(row, np.cumsum([0, *lengths[lengths > 0]]))


def _batch_in_flight() -> Mapping[str, Any] | None:
    """Return `inputs` of the innermost Trainer loop that is inside a step, None without one."""
    frame, in_step = inspect.currentframe(), False
    while frame is not None and frame.f_code is not CallbackHandler.call_event.__code__:
        if frame.f_code.co_name in _STEPS:
            in_step = True
        elif in_step and _is_loop(frame):
            batch = frame.f_locals.get("inputs")
            return batch if isinstance(batch, Mapping) else None
        frame = frame.f_back
    return None


def _is_loop(frame: FrameType) -> bool:
    # Names are checked first: before Python 3.13, reading the variables of a frame copies them.
    names = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
    return {"self", "inputs"} <= names and isinstance(frame.f_locals.get("self"), Trainer)
