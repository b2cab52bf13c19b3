"""Checks isolation on the documents of a run before anything is trained on them.

The backend in use is checked, then its fallbacks, from fast to slow; if none is exact, the run is
refused, warned of, or padded. All backends train the same documents in each step to the same loss.
A check is recorded after its verdict, so a model that was refused is refused again.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from torch import nn

from trl_packing.attention import sequence_parallel
from trl_packing.attention.backends import (
    PADDED,
    AttentionChoice,
    divide_rows,
    resolve_attention,
)
from trl_packing.attention.install import install_attention
from trl_packing.attention.model_facts import (
    length_constants,
    rope_thresholds,
    temporarily,
    unwrap_peft,
)
from trl_packing.attention.ranks import all_reduce_max
from trl_packing.attention.recurrent import NAME as BY_DOCUMENT
from trl_packing.data.limits import limits_of
from trl_packing.data.stream import NOTHING_TO_TRAIN
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.isolation.check import (
    NOT_FINITE,
    VERDICTS,
    CheckResult,
    IsolationReport,
    Refusal,
    attempt,
    brief,
    check_fused_head,
    check_isolation,
    check_probes,
)
from trl_packing.isolation.mixing import run_mixing_modules_by_document
from trl_packing.isolation.probes import Probe, probes
from trl_packing.loss.lm_head import register_head, use_native_head
from trl_packing.packing.collator import PackedCollator

logger = logging.getLogger(__name__)

_OF_STREAM = 16  # rows of a stream that are read
REACH = 1024  # tokens of the longest probe of a plain trainer, if no documents are given


# Kind of device ("cpu", "cuda") and dtype of a forward pass; None: that of the model.
Precision = tuple[str, torch.dtype | None]


class NotIsolated(RuntimeError):
    """Documents affect each other, or cannot be packed, by any backend that may be used."""


class IsolationGuard:
    """Keep the documents of packed rows isolated on `model`, or refuse to run it.

    Args:
        model: the model on which backends are installed; PEFT may wrap it.
        attention: the name of a backend, or "auto" for the fastest one that is exact.
        isolation_check: "error", "warn" or "off", as in `PackedSFTConfig`.
        packing_requested: if not, and no backend is exact, rows are padded, as in TRL.
        is_ours: `PackedSFTTrainer` runs the model: by TRL's fused LM head, ranks alike.
        num_ranks: over which rows are divided.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: str,
        isolation_check: str,
        packing_requested: bool = True,
        is_ours: bool = True,
        num_ranks: int = 1,
    ):
        self.model = model
        self.limits = limits_of(unwrap_peft(model))
        self.checks = isolation_check != "off"
        if attention == BY_DOCUMENT and not self.checks:
            raise ValueError(
                "attention='by_document' and isolation_check='off' exclude each other: the check "
                "finds the modules that mix documents; set isolation_check='error'"
            )
        # Checks that allowed the run with the backend in use: precision, whether in training, and
        # tokens of the shortest and the longest document, which were checked together.
        self.passed: list[tuple[Precision, bool, int, int]] = []
        self._results: dict[bool, CheckResult] = {}  # of the backend in use, by training
        self._requested = attention
        self._isolation_check = isolation_check
        self._packing_requested = packing_requested
        self._is_ours = is_ours
        self._num_ranks = num_ranks
        self._choices: list[AttentionChoice] = []  # the backend in use, then its fallbacks
        self._precision: Precision | None = None  # for which they were resolved
        self._collator: PackedCollator | None = None  # a copy of the one whose rows were checked
        self._head_is_checked = False
        # accelerate's logger logs on one rank, and needs the state that a trainer sets up.
        self._logger = get_logger(__name__) if is_ours else logger

    @property
    def attention(self) -> AttentionChoice:
        """The backend in use."""
        return self._choices[0]

    @property
    def checked(self) -> "Checked":
        """The result of the check for training (else for evaluation) on the backend in use."""
        result = self._results.get(True, self._results.get(False))
        if result is None:
            return Checked(reason=_NOT_YET if self.checks else "isolation_check='off'")
        # Among the backends of "auto", padded rows are used after a failure only as in `_accept`.
        pads = self._requested == "auto" and self.attention.backend == "padded"
        reason = "" if result else _PADDED if pads else _GOES_ON
        if isinstance(result, Refusal):
            return Checked(result.verdict, reason, error=str(result))
        return Checked(result.verdict, reason, result, is_padded=pads and not result)

    @property
    def base_model(self) -> Any:
        """The transformers model inside PEFT's."""
        return unwrap_peft(self.model)

    def select_backend(self, precision: Precision) -> None:
        """Install the fastest backend for `precision`; ValueError if the one named cannot be."""
        device, dtype = precision
        best = resolve_attention(self.base_model, self._requested, device=device, dtype=dtype)
        choices = [best, *best.slower]
        if self._num_ranks > 1:
            choices = divide_rows(self.model, choices, self._num_ranks)
        self._use(install_first(self.model, choices), precision)

    def sample(self, dataset: Any, max_length: int | None) -> list[np.ndarray]:
        """Return token ids ``(T,)`` of representative documents; none if nothing is checked.

        Args:
            dataset: documents or packed rows. Of a stream, only the first rows are read, and a
                longer document is added if one to come may cross a length constant of the model.
            max_length: most tokens of a document of a stream; None if unknown.

        Raises:
            ValueError: a stream is empty, or one of its documents exceeds the model's limits.
        """
        if not self.checks:
            return []
        if not isinstance(dataset, IterableDataset):
            if not is_packed(dataset):
                documents = ArrowDocuments(dataset, ["input_ids"])
                chosen = representative_documents(documents.lengths())
                return [documents[i]["input_ids"] for i in chosen]
            documents = ArrowDocuments(dataset, ["input_ids", SEQ_LENGTHS])
            lengths = np.array([row[SEQ_LENGTHS].max() for row in documents])
            rows = [documents[i] for i in representative_documents(lengths)]
            parts = [np.split(row["input_ids"], np.cumsum(row[SEQ_LENGTHS])[:-1]) for row in rows]
            return [document for row in parts for document in row]
        first = list(islice(dataset, _OF_STREAM))
        if not first:
            raise ValueError(NOTHING_TO_TRAIN)
        for number, row in enumerate(first):
            self.limits.check_document(row, f"document {number} of the stream")
        found = [np.asarray(row["input_ids"]) for row in first]
        longest = max(map(len, found))
        # Documents that are still to come may be as long as max_length allows.
        beyond = [c for c in length_constants(self.model) if longest <= c < (max_length or 0)]
        return [*found, np.resize(found[0], beyond[-1] + 1)] if beyond else found

    def covers(
        self, documents: Sequence[np.ndarray], *, training: bool, precision: Precision
    ) -> bool:
        """Return whether `ensure` would do nothing for these arguments."""
        if not self.checks:
            return precision == self._precision
        shortest, longest = _extremes(documents)
        return any(
            (known, mode) == (precision, training) and least <= shortest and longest <= most
            for known, mode, least, most in self.passed
        )

    def trust(
        self, documents: Sequence[np.ndarray], *, training: bool, precision: Precision
    ) -> None:
        """Record a check as passed."""
        self.passed.append((precision, training, *_extremes(documents)))

    def ensure(
        self,
        documents: Sequence[np.ndarray],
        *,
        training: bool,
        precision: Precision | None = None,
        wrapped: nn.Module | None = None,
        collator: PackedCollator | None = None,
    ) -> None:
        """Return once packed documents are isolated, or raise NotIsolated.

        Args:
            documents: token ids ``(T,)`` of documents that represent those to run.
            training: the mode of the forward pass.
            precision: its device and dtype, by default those of the last `select_backend`.
            wrapped: the model as it is called, by default `model`.
            collator: makes the packed rows, by default a `PackedCollator`.
        """
        precision = precision or self._precision
        assert precision is not None, "no backend was selected"
        wrapped = self.model if wrapped is None else wrapped
        if collator != self._collator:  # a user may set another one between two runs
            self.forget_checks()
            self._collator = copy.copy(collator)
        if self.covers(documents, training=training, precision=precision):
            return
        if precision != self._precision:
            self.select_backend(precision)
        if not self.checks:
            return
        if self._is_ours:
            all_reduce_max(0)  # ranks begin together: one that raises does not wait long for others
        options = {
            "training": training,
            "fused_head": self._is_ours,
            "collator": collator or PackedCollator(),
        }
        try:
            left, result = self._first_exact(self._choices, documents, wrapped, options)
            left = left if result else self._accept(left, result)
        except BaseException:  # not exact, out of memory, interrupted
            install_first(self.model, self._choices)
            raise
        if result:
            self._logger.info(str(result))
        if left[0].backend != self.attention.backend:
            self._logger.warning(f"{type(self.base_model).__name__} runs by {left[0]}")
        self._use(left, precision)
        self.trust(documents, training=training, precision=precision)
        self._results[training] = result

    def check_head(self, wrapped: nn.Module) -> None:
        """Score the native logits where TRL's fused LM head computes something else."""
        register_head(self.base_model)
        if self._head_is_checked:
            return
        # All ranks or none: the two heads do not gather the same parameters in the same order.
        if all_reduce_max(int(not check_fused_head(wrapped))):
            self._logger.warning(
                f"TRL's fused LM head computes another loss than {type(self.base_model).__name__},"
                " whose head is more than a matrix: training on the model's own logits"
            )
            use_native_head(self.base_model)
        self._head_is_checked = True

    def forget_checks(self) -> None:
        """Check the backend in use again, such as on the model as it will be wrapped."""
        self.passed = []
        self._results = {}

    def probes(self, documents: Sequence[np.ndarray], *, thorough: bool) -> list[Probe]:
        """Return the probes of the check on these documents, as `isolation.probes` makes them."""
        return probes(self.base_model, documents, 0 if self._is_ours else REACH, thorough)

    def _use(self, choices: list[AttentionChoice], precision: Precision) -> None:
        """Record that the first of `choices` is installed; forget the checks of another backend."""
        if self._choices and choices[0].backend != self.attention.backend:
            self.forget_checks()
        self._choices, self._precision = choices, precision

    def _first_exact(
        self,
        choices: Sequence[AttentionChoice],
        documents: Sequence[np.ndarray],
        wrapped: nn.Module,
        options: dict[str, Any],
    ) -> tuple[list[AttentionChoice], CheckResult]:
        """Install the first of `choices` that is exact; return it, those after it, and its result.

        If none is, the first that can be installed is, with the first failure.
        """
        failed: list[CheckResult] = []
        by_document: list[str] = []  # classes of modules

        def check(choice: AttentionChoice) -> IsolationReport:
            by_document[:] = _install(
                self.model, choice, wrapped, options["training"], ranks_alike=self._is_ours
            )
            thorough = bool(failed) or choice.backend in PADDED
            made = self.probes(documents, thorough=thorough)
            with temporarily(sequence_parallel, patience=_PATIENCE):
                return check_probes(wrapped, made, attention=str(choice), **options)

        for choice in choices:
            result = attempt(check, choice)
            if self._is_ours:
                result = worst_of_ranks(result)
            if result or result.verdict == NOT_FINITE:  # without packing, and by any backend
                break
            failed.append(result)
        left = list(choices[len(failed) :])
        reasons = [f"{c.backend} {_in_short(f)}" for c, f in zip(choices, failed, strict=False)]
        if not result:
            left = install_first(self.model, choices)
            result = failed[0] if failed else result
        if left[0].backend == BY_DOCUMENT and by_document:
            reasons.insert(0, ", ".join(by_document))
        # The failure of a single backend is what the refusal says itself.
        if len(failed) > 1 or (result and failed):
            left[0] = replace(left[0], reason="; ".join(reasons))
        return left, result

    def _accept(self, left: list[AttentionChoice], result: CheckResult) -> list[AttentionChoice]:
        """Return the backends to run, the first installed, although none is exact, or raise."""
        named = self._requested != "auto"
        name = type(self.base_model).__name__
        fails = result.verdict in ("leaks", "refused")
        can_pad = self._num_ranks == 1 and not self._packing_requested
        if fails and can_pad and not named:
            self._logger.warning(f"{result}: {_PADDED}")
            padded = AttentionChoice(
                "padded", None, "nothing is exact on this model", left[0].native
            )
            install_attention(self.model, padded)
            return [padded]
        remedy = f"no other backend is exact ({left[0].reason})"
        if named:
            remedy = f"set attention='auto' in place of {self._requested!r}"
        elif self._num_ranks > 1:
            remedy = f"sequence_parallel_size={self._num_ranks} takes no other backend; set it to 1"
        if isinstance(result, Refusal):
            packed = f"{name} cannot run packed documents: {result}; {remedy}"
            raise NotIsolated(packed if fails else str(result))
        if rope_thresholds(self.base_model):
            remedy += ", or max_length to one side of the model's length threshold"
        if fails and self._isolation_check == "error":
            raise NotIsolated(f"{result}; {remedy}; isolation_check='warn' trains all the same")
        self._logger.warning(f"{result}; {_GOES_ON}")
        return left


def _extremes(documents: Sequence[np.ndarray]) -> tuple[int, int]:
    lengths = [len(document) for document in documents] or [0]
    return min(lengths), max(lengths)


def representative_documents(lengths: np.ndarray) -> list[int]:
    """Return the indices of the shortest, a middling and the longest document, in data-set order.

    Examples:
        >>> representative_documents(np.array([5, 90, 7, 30, 2]))
        [1, 2, 4]
    """
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[i]) for i in (0, len(order) // 2, -1)})


def install_first(model: nn.Module, choices: Sequence[AttentionChoice]) -> list[AttentionChoice]:
    """Install the first of `choices` that can be; return it and those after it.

    A package that was built for another torch fails when it is imported, which is here.
    """
    first, *others = choices
    try:
        install_attention(model, first)
    except Exception as error:
        if not others:
            raise
        logger.warning(f"{first.backend} refused ({type(error).__name__}: {error})")
        return install_first(model, others)
    return [first, *others]


def _install(
    model: nn.Module,
    choice: AttentionChoice,
    wrapped: nn.Module,
    training: bool | None,
    *,
    ranks_alike: bool = False,
) -> list[str]:
    """Install `choice`; return the classes of the modules that it runs by document."""
    install_attention(model, choice)
    if choice.backend != BY_DOCUMENT:
        return []
    return run_mixing_modules_by_document(wrapped, training, ranks_alike=ranks_alike)


def check_backend(model: nn.Module, choice: AttentionChoice, **options: Any) -> CheckResult:
    """Install `choice` and return the result of `check_isolation` with it, with these options."""

    def check() -> IsolationReport:
        _install(model, choice, model, options.get("training"))
        return check_isolation(model, attention=str(choice), **options)

    return attempt(check)


def _in_short(result: CheckResult) -> str:
    if isinstance(result, Refusal):
        return f"refused ({str(result)[:80]})"
    verdict = "differs" if result.whatever_others else result.verdict
    by = f" by {brief(result.difference)}" if result.verdict == "leaks" else ""
    images = " with images" if result.has_images else ""
    return verdict + by + images


_FROM_BEST = (*VERDICTS, "refused", NOT_FINITE)

# Seconds that a rank whose forward raised waits for the others. They may hang in that forward,
# where a sharded model gathers its weights, until the timeout of the process group.
_PATIENCE = 60.0


def worst_of_ranks(result: CheckResult) -> CheckResult:
    """Return `result`, or a worse one of another rank: ranks that disagree wait for ever."""
    # Ranks that divide a row have waited for this one before they come here.
    patience = 2 * _PATIENCE if isinstance(result, Refusal) else None
    try:
        worst = all_reduce_max(_FROM_BEST.index(result.verdict), patience=patience)
    except RuntimeError as error:
        raise RuntimeError(
            f"this rank's isolation check says {result}, and the others do not answer"
        ) from error
    verdict = _FROM_BEST[worst]
    if verdict == result.verdict:
        return result
    if isinstance(result, Refusal) or verdict not in VERDICTS:
        return Refusal("another rank refuses it, and says why", verdict)
    return replace(result, verdict=verdict, probe="on another rank than this")


_NOT_YET = "train() checks before its first step"
_PADDED = "rows are padded, as in TRL"
_GOES_ON = "the run goes on (trl-packing verify --dtype float32 sees more)"


@dataclass(frozen=True)
class Checked:
    """The check of a run on its model: `verdict` "refused" with its `error`, or with `evidence`.

    `reason`: why nothing was checked, or why the run goes on although documents may leak.
    """

    verdict: str = "not checked"
    reason: str = "a preview loads no model; trl-packing verify checks one"
    evidence: IsolationReport | None = None
    error: str = ""
    is_padded: bool = False

    def __str__(self) -> str:
        if self.error:
            return f"{self.reason}: the model refuses packed ones ({self.error})"
        if self.evidence is None:
            return f"nothing ({self.reason})"
        numbers = self.evidence.numbers
        if self.is_padded:
            return f"{_PADDED}, for documents would LEAK into each other: {numbers}"
        word = self.evidence.words.removeprefix("documents are ")
        reason = f"; {self.reason}" if self.reason else ""
        return f"{word}: {numbers}{reason}"
