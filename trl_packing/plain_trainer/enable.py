"""Packing for plain `transformers.Trainer`: teaches a model to recognize packed rows.

    enable_packing(model)                                      this module
    dataset = make_supervised_dset(tokenizer, data_path, ...)  supervised.py, dataset.py
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.train()

In training, the model takes calls with boundaries only. A call on a packed row runs without a mask
and without a cache, by the fastest attention backend that isolates documents on this model
(`IsolationGuard`). Its loss is the mean over the trained tokens of the step, also if the model's
class ignores `num_items_in_batch`. Other
calls are unchanged: evaluation of padded rows, `generate`, and those inside `other_rows`.
"""

from typing import Any

import numpy as np
from torch import nn

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.implementation import restore_implementation
from trl_packing.attention.model_facts import unwrap_peft
from trl_packing.attention.packed_calls import settle_first
from trl_packing.config import ISOLATION_CHECKS
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.isolation.sample import representative_documents
from trl_packing.plain_trainer.dataset import PackedDataset, enabled_models
from trl_packing.plain_trainer.forward import (
    Packing,
    precision_from_model,
    unwrap_forward,
    wrap_forward,
)
from trl_packing.plain_trainer.requirements import (
    check_documents,
    check_loss,
    check_model,
    divides_by_count,
)
from trl_packing.versions import warn_of_untested_versions

warn_of_untested_versions()

_REACH = 1024  # tokens of the longest probe if no data set is given


def enable_packing(
    model: nn.Module,
    dataset: Any = None,
    *,
    attention: str = "auto",
    isolation_check: str = "error",
) -> AttentionChoice:
    """Make `model` isolate the documents of packed rows in any trainer; return the backend.

    Call it before `Trainer` is created, on the model that `Trainer` is given (PEFT's, if it is
    wrapped). The model is saved as if packing had not been enabled.

    Plain Trainer's `eval_loss` remains a mean of the means of micro-batches. `PackedSFTTrainer`
    reports the mean over all tokens.

    Args:
        model: a decoder of transformers, which PEFT may wrap.
        dataset: the data that it will train on: a `PackedDataset`, or token ids of some documents.
            The check is then as long as the longest document. Without a data set, the check covers
            1,024 tokens, and a document beyond a length at which the model changes is checked when
            it is first used.
        attention: as in `PackedSFTConfig`.
        isolation_check: as in `PackedSFTConfig`. The check runs here. It is repeated in the first
            packed call on another device, in another precision or in another mode, since Trainer
            sets these later.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model or a setting cannot be packed exactly.
        RuntimeError: the model cannot run packed documents, or they leak into each other with
            every backend that may be used.
    """
    base = unwrap_peft(model)
    check_model(model, base)
    if isolation_check not in ISOLATION_CHECKS:
        raise ValueError(
            f"isolation_check={isolation_check!r} is not known; choose one of "
            f"{', '.join(ISOLATION_CHECKS)}"
        )
    if isolation_check != "off":
        check_loss(model, base)  # before the model is changed: if refused, it stays as it was
    documents = _documents_from_dataset(dataset)
    check_documents(base, dataset, documents)
    guard = IsolationGuard(
        model,
        attention=attention,
        isolation_check=isolation_check,
        fused_head=False,
        agree=False,  # no forward waits for other ranks, and here they need not all be present
        max_length=_REACH,
        modes_share_lengths=False,
    )
    packing = Packing(guard, documents, max([_REACH, *map(len, documents)]), divides_by_count(base))
    wrap_forward(model, packing)
    # Trainer then counts the targets of a step, and `run_with_packed_loss` divides by them.
    base.accepts_loss_kwargs = True
    with unwrap_forward(model, packing):
        guard.ensure(documents, training=True, precision=precision_from_model(model))
    restore_implementation(base)  # packed calls set it
    settle_first(model, None)  # `wrap_forward` checks it from now on
    for module in (model, base, getattr(base, "base_model", base)):
        module.trains_packed_rows = True  # in training, calls without boundaries are refused
    enabled_models.add(model)
    return guard.attention


def _documents_from_dataset(dataset: Any) -> list[np.ndarray]:
    if dataset is None:
        return []
    if isinstance(dataset, PackedDataset):
        return [dataset.token_ids(i) for i in representative_documents(dataset.lengths)]
    return [np.asarray(document, dtype=np.int64) for document in dataset]
