"""Checks isolation on the documents of a run before anything is trained on them.

    ensure    an earlier check covers these documents     return
              the backend in use passes the check         record it, return
              it fails                                    check its fallbacks (fallback.py)
              no backend is exact                         refuse, warn, or pad rows

A check is recorded after its verdict. A model that was refused is refused again, and an error in
the check (out of memory) is no verdict. `PackedSFTTrainer` and `enable_packing` share this guard.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import nn

from trl_packing.attention.backends import PADDED, AttentionChoice, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.attention.model_facts import rope_thresholds, text_config, unwrap_peft
from trl_packing.attention.sharding import all_reduce_max, announce_head
from trl_packing.data.limits import limits_of
from trl_packing.isolation.check import check_fused_head
from trl_packing.isolation.evidence import Checked
from trl_packing.isolation.fallback import (
    CheckResult,
    Refusal,
    install_first,
    install_first_exact,
    with_fallbacks,
)
from trl_packing.isolation.measure import Stage
from trl_packing.isolation.sample import sample_documents
from trl_packing.loss.lm_head import use_native_head
from trl_packing.packing.collator import PackedCollator


class Precision(NamedTuple):
    """Kind of device ("cpu", "cuda") and dtype of a forward pass."""

    device: str
    dtype: torch.dtype | None

    @classmethod
    def of_settings(cls, args: Any) -> "Precision":
        """Return that of a training with `args`; no dtype without mixed precision."""
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        return cls(args.device.type, dtype)


class Passed(NamedTuple):
    """A check that allowed the run: what it was made for, and the lengths that it covers."""

    precision: Precision
    training: bool
    shortest: int  # tokens of the shortest and the longest document, which were checked together
    longest: int


class NotIsolated(RuntimeError):
    """Documents affect each other, or cannot be packed, by any backend that may be used."""


class IsolationGuard:
    """Keep the documents of packed rows isolated on `model`, or refuse to run it.

    Args:
        model: the model on which backends are installed; PEFT may wrap it.
        attention: the name of a backend, or "auto" for the fastest one that is exact.
        isolation_check: "error", "warn" or "off", as in `PackedSFTConfig`.
        packing_requested: whether packed or padding-free rows were requested. If not, and no
            backend is exact, rows are padded, so that existing TRL code keeps running.
        fused_head: whether packed rows are scored through TRL's fused LM head.
        agree: whether all ranks check together and install the same backend.
        max_length: tokens of the longest probe if no documents are given.
        modes_share_lengths: whether documents that passed in training are left out of the check in
            evaluation, and the other way around. Short probes are always run.

    Attributes:
        limits: ids and lengths that the model can read.
        passed: checks that allowed the run, made on the backend in use.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: str,
        isolation_check: str,
        packing_requested: bool = True,
        fused_head: bool = True,
        agree: bool = True,
        max_length: int = 0,
        modes_share_lengths: bool = True,
    ):
        self.model = model
        self.limits = limits_of(self.base_model)
        self.passed: list[Passed] = []
        self._results: dict[bool, CheckResult] = {}  # of the backend in use, by training
        self._requested, self._isolation_check = attention, isolation_check
        self._packing_requested = packing_requested
        self._options = {"fused_head": fused_head, "agree": agree, "max_length": max_length}
        self._modes_share_lengths = modes_share_lengths
        self._choices: list[AttentionChoice] = []  # the backend in use, then its fallbacks
        self._precision: Precision | None = None  # for which they were resolved
        self._collator: PackedCollator | None = None  # a copy of the one whose rows were checked
        self._head_is_checked = False
        # accelerate's logger logs on one rank, and needs the state that a trainer sets up.
        self._logger = get_logger(__name__) if agree else logging.getLogger(__name__)

    @property
    def attention(self) -> AttentionChoice:
        """The backend in use."""
        return self._choices[0]

    @property
    def checked(self) -> Checked:
        """The result of the check for training (else for evaluation) on the backend in use."""
        result = self._results.get(True, self._results.get(False))
        # Among the backends of "auto", padded rows are used after a failure only as in `_accept`.
        pads = self._requested == "auto" and self.attention.backend == "padded" and not result
        return Checked.from_result(result, isolation_check=self._isolation_check, pads=pads)

    @property
    def checks(self) -> bool:
        """Whether documents are checked at all."""
        return self._isolation_check != "off"

    @property
    def base_model(self) -> Any:
        """The transformers model inside PEFT's."""
        return unwrap_peft(self.model)

    def select_backend(self, precision: Precision) -> None:
        """Install the fastest backend for `precision`, before any check.

        Raises:
            ValueError: the requested backend is unknown, or cannot be exact on this model.
        """
        choices = install_first(self.model, self._resolve(precision))
        self._use(choices[0], choices, precision)

    def sample(self, dataset: Any, max_length: int | None) -> list[np.ndarray]:
        """Return `sample_documents` of a data set, or none if nothing will be checked."""
        if self._isolation_check == "off":
            return []
        return sample_documents(dataset, self.model, max_length, self.limits)

    def covers(
        self, documents: Sequence[np.ndarray], *, training: bool, precision: Precision
    ) -> bool:
        """Return whether `ensure` would do nothing for these arguments."""
        if self._isolation_check == "off":
            return any(check.precision == precision for check in self.passed)
        shortest, longest = _extremes(documents)
        return any(
            (check.precision, check.training) == (precision, training)
            and check.shortest <= shortest
            and longest <= check.longest
            for check in self.passed
        )

    def trust(
        self, documents: Sequence[np.ndarray], *, training: bool, precision: Precision
    ) -> None:
        """Record a check as passed."""
        self.passed.append(Passed(precision, training, *_extremes(documents)))

    def ensure(
        self,
        documents: Sequence[np.ndarray],
        *,
        training: bool,
        precision: Precision | None = None,
        wrapped: nn.Module | None = None,
        collator: PackedCollator | None = None,
    ) -> None:
        """Return once packed documents are isolated; check what no earlier check covers.

        Args:
            documents: token ids ``(T,)`` of documents that represent those to run.
            training: the mode of the forward pass.
            precision: its device and dtype, by default those of the last `select_backend`.
            wrapped: the model as it is called, by default `model`.
            collator: makes the packed rows, by default a `PackedCollator`.

        Raises:
            NotIsolated: the model cannot run packed documents; or, under
                ``isolation_check="error"``, no backend that may be used isolates them.
        """
        precision = precision or self._precision
        assert precision is not None, "no backend was selected"
        if collator != self._collator:  # a user may set another one between two runs
            self.forget_checks()
            self._collator = copy.copy(collator)
        if self.covers(documents, training=training, precision=precision):
            return
        is_selected = precision == self._precision
        if self._isolation_check == "off":
            if not is_selected:
                self.select_backend(precision)
            self.trust(documents, training=training, precision=precision)
            return
        if self._options["agree"]:
            all_reduce_max(0)  # ranks begin together: one that raises does not wait long for others
        choices = self._choices if is_selected else self._resolve(precision)
        calls = {"training": training, "wrapped": wrapped, "collator": collator}
        try:
            choice, result = self._search(choices, documents, precision, calls)
            choice = choice if result else self._accept(choice, result)
        except BaseException:
            if not is_selected:  # the first of `choices` is installed, and was not checked
                self.forget_checks()
                self._precision = None
            raise
        if result:
            self._logger.info(str(result))
        if choice.backend != choices[0].backend:
            self._logger.warning(f"{type(self.base_model).__name__} runs by {choice}")
        self._use(choice, choices, precision)
        self.trust(documents, training=training, precision=precision)
        self._results[training] = result

    def check_head(self, wrapped: nn.Module) -> None:
        """Score the native logits where TRL's fused LM head computes something else."""
        announce_head(self.base_model)
        if self._head_is_checked:
            return
        # All ranks or none: the two heads do not gather the same parameters in the same order.
        differs = int(not check_fused_head(wrapped))
        if all_reduce_max(differs):
            self._logger.warning(
                f"TRL's fused LM head computes another loss than {type(self.base_model).__name__},"
                " whose head is more than a matrix: training on the model's own logits"
            )
            use_native_head(self.base_model)
        self._head_is_checked = True

    def _resolve(self, precision: Precision) -> list[AttentionChoice]:
        choice = resolve_attention(
            self.base_model, self._requested, device=precision.device, dtype=precision.dtype
        )
        return with_fallbacks(choice) if self._requested == "auto" else [choice]

    def _use(
        self, choice: AttentionChoice, choices: Sequence[AttentionChoice], precision: Precision
    ) -> None:
        """Record that `choice` is installed; forget the checks of another backend."""
        if self._choices and choice.backend != self.attention.backend:
            self.forget_checks()
        backends = [known.backend for known in choices]
        after = choices[backends.index(choice.backend) + 1 :] if choice.backend in backends else []
        self._choices, self._precision = [choice, *after], precision

    def forget_checks(self) -> None:
        """Check the backend in use again, such as on the model as it will be wrapped."""
        self.passed, self._results = [], {}

    def _search(
        self,
        choices: Sequence[AttentionChoice],
        documents: Sequence[np.ndarray],
        precision: Precision,
        calls: dict[str, Any],
    ) -> tuple[AttentionChoice, CheckResult]:
        """Install the first exact backend of `choices`; return it and its result."""
        options = self._options | calls
        if (
            self._modes_share_lengths
            and choices is self._choices
            and self.covers(documents, training=not calls["training"], precision=precision)
        ):
            choice, result = install_first_exact(self.model, choices[:1], **options)
            if result:
                return choice, result
        return install_first_exact(self.model, choices, documents, **options)

    def _accept(self, choice: AttentionChoice, result: CheckResult) -> AttentionChoice:
        """Return the backend to run although none is exact.

        Raises:
            NotIsolated: none may be run.
        """
        named = self._requested != "auto"
        fails = result.verdict in ("leaks", "refused")
        if fails and not self._packing_requested and not named:
            self._logger.warning(f"{result}: rows are padded, as in TRL")
            padded = AttentionChoice(
                "padded", None, "nothing is exact on this model", choice.native
            )
            install_attention(self.model, padded)
            return padded
        message = _why_not_exact(self.base_model, choice, result, named=named)
        if isinstance(result, Refusal) or (fails and self._isolation_check == "error"):
            raise NotIsolated(message)
        self._logger.warning(message)
        return choice


def _extremes(documents: Sequence[np.ndarray]) -> tuple[int, int]:
    """Return the tokens of the shortest and the longest document, zeros for none."""
    lengths = [len(document) for document in documents] or [0]
    return min(lengths), max(lengths)


# --- messages, each with a remedy that fits -------------------------------------------------------


def _why_not_exact(model: Any, choice: AttentionChoice, result: CheckResult, *, named: bool) -> str:
    """Return why `model` cannot train packed documents with `choice`, and the remedy.

    Args:
        model: the transformers model.
        choice: the backend that was checked first. Its reason lists the failures of all backends,
            unless it is `named`.
        result: its failure.
        named: whether the user chose the backend. If not, all of them were checked.
    """
    name = type(model).__name__
    if isinstance(result, Refusal):
        if result.stage is Stage.ALONE:
            return f"{name} cannot run a document even alone, unpacked: {result}{_limits(model)}"
        if result.stage is Stage.NOT_FINITE:
            return str(result).removeprefix("ValueError: ")
        if result.stage is Stage.COLLATOR:
            return f"the data collator makes no packed row: {result}"
        if named:
            return f"{name} cannot run packed documents by {choice}: {result}. {_auto(choice)}"
        return f"{name} cannot run packed documents by any backend: {choice.reason}"
    if result.verdict == "inconclusive":
        return f"{result}; the run goes on (trl-packing verify --dtype float32 sees more)"
    remedies = [_auto(choice) if named else f"No other backend is exact either ({choice.reason})"]
    if rope_thresholds(model):
        remedies.append(
            "keep documents on one side of the model's length threshold with max_length"
        )
    return f"{result}. {', or '.join(remedies)}; isolation_check='warn' trains all the same"


def _auto(choice: AttentionChoice) -> str:
    padded = "" if choice.backend in PADDED else " (attention='padded' fits most models)"
    return f"Set attention='auto', which takes the fastest exact backend{padded}"


def _limits(model: Any) -> str:
    """Return the two limits of a model, of ids and of lengths, that a document may exceed."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    limits = [
        f"{value:,} {unit}"
        for value, unit in (
            (getattr(embeddings, "num_embeddings", None), "token ids"),
            (getattr(text_config(model), "max_position_embeddings", None), "positions"),
        )
        if isinstance(value, int)
    ]
    return f" (the model has {' and '.join(limits)})" if limits else ""
