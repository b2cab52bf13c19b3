"""Checks isolation on the documents of a run before anything is trained on them.

    ensure    an earlier check covers these documents     return
              the backend in use passes the check         record it, return
              it fails                                    check its fallbacks, from fast to slow
              no backend is exact                         refuse, warn, or pad rows

    flash, varlen, documents   kernels that take boundaries          chosen by `resolve_attention`
    model                      the model's native mask, from position_ids
    mask                       an explicit 4-D block-diagonal mask
    padded                     padded rows of the same documents
    equal_lengths              rows of equal length, without padding

All backends train the same documents in each step to the same loss. They differ in speed only. A
check is recorded after its verdict. A model that was refused is refused again, and an error in the
check (out of memory) is no verdict. `PackedSFTTrainer` and `enable_packing` share this guard.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from torch import nn

from trl_packing.attention.backends import (
    NATIVE_ATTENTION,
    PADDED,
    AttentionChoice,
    resolve_attention,
)
from trl_packing.attention.install import install_attention
from trl_packing.attention.model_facts import (
    length_constants,
    rope_thresholds,
    unwrap_peft,
)
from trl_packing.attention.state import all_reduce_max, announce_head
from trl_packing.data.limits import limits_of
from trl_packing.data.stream import NOTHING_TO_TRAIN, check_lengths
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.isolation.check import (
    ALONE,
    COLLATOR,
    NOT_FINITE,
    PACKED,
    VERDICTS,
    CheckResult,
    IsolationReport,
    Probe,
    Refusal,
    attempt,
    check_fused_head,
    check_isolation,
    check_probes,
    probes,
)
from trl_packing.loss.lm_head import use_native_head
from trl_packing.packing.collator import PackedCollator

logger = logging.getLogger(__name__)

_OF_STREAM = 16  # rows of a stream that are read
REACH = 1024  # tokens of the longest probe of a plain trainer, if no documents are given


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
        is_ours: whether `PackedSFTTrainer` runs the model: through TRL's fused LM head, and with
            all ranks at the same backend. Documents that passed in training are then left out of
            the check in evaluation, and the other way around.

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
        is_ours: bool = True,
    ):
        self.model = model
        self.limits = limits_of(self.base_model)
        self.passed: list[Passed] = []
        self._results: dict[bool, CheckResult] = {}  # of the backend in use, by training
        self._requested, self._isolation_check = attention, isolation_check
        self._packing_requested, self._is_ours = packing_requested, is_ours
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
        self._use(install_first(self.model, self._resolve(precision)), precision)

    def sample(self, dataset: Any, max_length: int | None) -> list[np.ndarray]:
        """Return documents that represent a prepared data set, or none if nothing is checked.

        Args:
            dataset: documents or packed rows, stored or streamed. Only the first rows of a stream
                are read. A longer document is added if those to come may cross a length at which
                the model changes.
            max_length: most tokens of a document of a stream; None if unknown.

        Returns:
            Token ids ``(T,)`` of each.

        Raises:
            ValueError: a stream is empty, or one of its documents exceeds the model's limits.
        """
        if not self.checks:
            return []
        if not isinstance(dataset, IterableDataset):
            return _of_table(dataset)
        first = list(islice(dataset, _OF_STREAM))
        if not first:
            raise ValueError(NOTHING_TO_TRAIN)
        for number, row in enumerate(first):
            check_lengths(row, number)
            self.limits.check_document(row, f"document {number} of the stream")
        found = [document for row in first for document in _documents_of_row(row)]
        longest = max(map(len, found))
        # Documents that are still to come may be as long as max_length allows.
        beyond = [c for c in length_constants(self.model) if longest <= c < (max_length or 0)]
        return [*found, np.resize(found[0], beyond[-1] + 1)] if beyond else found

    def covers(
        self, documents: Sequence[np.ndarray], *, training: bool, precision: Precision
    ) -> bool:
        """Return whether `ensure` would do nothing for these arguments."""
        if not self.checks:
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
        if not self.checks:
            if not is_selected:
                self.select_backend(precision)
            self.trust(documents, training=training, precision=precision)
            return
        if self._is_ours:
            all_reduce_max(0)  # ranks begin together: one that raises does not wait long for others
        choices = self._choices if is_selected else self._resolve(precision)
        options = {
            "training": training,
            "fused_head": self._is_ours,
            "collator": collator or PackedCollator(),
        }
        try:
            result = None
            passed_else = self.covers(documents, training=not training, precision=precision)
            if self._is_ours and is_selected and passed_else:
                choice, result = self._first_exact(choices[:1], [], wrapped, options)
            if not result:
                choice, result = self._first_exact(choices, documents, wrapped, options)
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
        names = [known.backend for known in choices]
        slower = choices[names.index(choice.backend) + 1 :] if choice.backend in names else []
        self._use([choice, *slower], precision)
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

    def forget_checks(self) -> None:
        """Check the backend in use again, such as on the model as it will be wrapped."""
        self.passed, self._results = [], {}

    def probes(self, documents: Sequence[np.ndarray], *, thorough: bool) -> list[Probe]:
        """Return the probes of the check on these documents, as `isolation.check.probes` does."""
        reach = 0 if self._is_ours else REACH
        return probes(self.base_model, documents, reach, thorough)

    def _resolve(self, precision: Precision) -> list[AttentionChoice]:
        choice = resolve_attention(
            self.base_model, self._requested, device=precision.device, dtype=precision.dtype
        )
        return with_fallbacks(choice) if self._requested == "auto" else [choice]

    def _use(self, choices: list[AttentionChoice], precision: Precision) -> None:
        """Record that the first of `choices` is installed; forget the checks of another backend."""
        if self._choices and choices[0].backend != self.attention.backend:
            self.forget_checks()
        self._choices, self._precision = choices, precision

    def _first_exact(
        self,
        choices: Sequence[AttentionChoice],
        documents: Sequence[np.ndarray],
        wrapped: nn.Module | None,
        options: dict[str, Any],
    ) -> tuple[AttentionChoice, CheckResult]:
        """Install the first of `choices` that is exact; return it and its result.

        If none is, or a check breaks off (out of memory, interrupted), the first is installed: the
        backend whose check broke off may leak. The reason of the installed backend says how faster
        ones failed. A result that is false is that of the first one.
        """
        failed: list[CheckResult] = []

        def check() -> IsolationReport:
            install_attention(self.model, choice)
            made = self.probes(documents, thorough=bool(failed))
            model = self.model if wrapped is None else wrapped
            return check_probes(model, made, attention=str(choice), **options)

        try:
            for choice in choices:
                result = attempt(check)
                if self._is_ours:
                    result = worst_of_ranks(result)
                if result:
                    return _with_reason(choice, choices, failed), result
                failed.append(result)
                if result.verdict == NOT_FINITE:
                    break  # without packing, and by any backend
        except BaseException:
            install_first(self.model, choices)
            raise
        installed, *_ = install_first(self.model, choices)
        first = failed[0]
        if isinstance(first, Refusal) and len({getattr(f, "stage", None) for f in failed}) > 1:
            first = replace(first, stage=PACKED)  # not all backends failed before a packed call
        return _with_reason(installed, choices, failed if len(failed) > 1 else []), first

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
        message = self._why_not_exact(choice, result, named=named)
        if isinstance(result, Refusal) or (fails and self._isolation_check == "error"):
            raise NotIsolated(message)
        self._logger.warning(message)
        return choice

    def _why_not_exact(self, choice: AttentionChoice, result: CheckResult, *, named: bool) -> str:
        """Return why the model cannot train packed documents with `choice`, and a remedy that fits.

        Args:
            choice: the backend that was checked first. Its reason lists the failures of all
                backends, unless it is `named`.
            result: its failure.
            named: whether the user chose the backend. If not, all of them were checked.
        """
        name = type(self.base_model).__name__
        padded = "" if choice.backend in PADDED else " (attention='padded' fits most models)"
        auto = f"Set attention='auto', which takes the fastest exact backend{padded}"
        if isinstance(result, Refusal):
            if result.stage == ALONE:
                return f"{name} cannot run a document even alone, unpacked: {result}"
            if result.stage == NOT_FINITE:
                return str(result).removeprefix("ValueError: ")
            if result.stage == COLLATOR:
                return f"the data collator makes no packed row: {result}"
            if named:
                return f"{name} cannot run packed documents by {choice}: {result}. {auto}"
            return f"{name} cannot run packed documents by any backend: {choice.reason}"
        if result.verdict == "inconclusive":
            return f"{result}; the run goes on (trl-packing verify --dtype float32 sees more)"
        remedy = auto if named else f"No other backend is exact either ({choice.reason})"
        if rope_thresholds(self.base_model):
            remedy += (
                ", or keep documents on one side of the model's length threshold with max_length"
            )
        return f"{result}. {remedy}; isolation_check='warn' trains all the same"


# --- documents that represent a data set ----------------------------------------------------------


def _extremes(documents: Sequence[np.ndarray]) -> tuple[int, int]:
    """Return the tokens of the shortest and the longest document, zeros for none."""
    lengths = [len(document) for document in documents] or [0]
    return min(lengths), max(lengths)


def representative_documents(lengths: np.ndarray) -> list[int]:
    """Return the indices of the shortest, a middling and the longest document, in data-set order.

    Args:
        lengths: tokens of each document, ``(N,)`` int64, at least one document.

    Examples:
        >>> representative_documents(np.array([5, 90, 7, 30, 2]))
        [1, 2, 4]
    """
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[i]) for i in (0, len(order) // 2, -1)})


def _of_table(dataset: Any) -> list[np.ndarray]:
    """Return representative documents of a stored data set, whose rows may hold several each."""
    packed = is_packed(dataset)
    documents = ArrowDocuments(dataset, ["input_ids", *[SEQ_LENGTHS] * packed])
    lengths = documents.lengths()
    if packed:
        lengths = np.array([row[SEQ_LENGTHS].max() for row in documents])
    chosen = representative_documents(lengths)
    return [document for i in chosen for document in _documents_of_row(documents[i])]


def _documents_of_row(row: Any) -> list[np.ndarray]:
    """Return the token ids of each document; a packed row holds several."""
    ids, lengths = np.asarray(row["input_ids"]), row.get(SEQ_LENGTHS)
    return [ids] if lengths is None else np.split(ids, np.cumsum(lengths)[:-1])


# --- backends from fast to slow -------------------------------------------------------------------


def with_fallbacks(choice: AttentionChoice) -> list[AttentionChoice]:
    """Return `choice` and its fallbacks, from fast to slow."""
    is_native = choice.backend in NATIVE_ATTENTION
    after = NATIVE_ATTENTION.index(choice.backend) + 1 if is_native else 0
    native = [AttentionChoice(name, None, "", choice.native) for name in NATIVE_ATTENTION[after:]]
    return [choice, *choice.slower, *native]


def install_first(model: nn.Module, choices: Sequence[AttentionChoice]) -> list[AttentionChoice]:
    """Install the first of `choices` that can be installed; return it and those after it.

    A package that was built for another torch fails only when it is imported, which is here.

    Raises:
        Exception: the error of the last choice, if none can be installed.
    """
    for number, choice in enumerate(choices):
        try:
            install_attention(model, choice)
        except Exception as error:
            if choice is choices[-1]:
                raise
            failed = f"{choice.backend} {_in_short(Refusal.from_error(error))}"
            logger.warning(f"{failed}: trying {choices[number + 1].backend}")
        else:
            return list(choices[number:])
    raise ValueError("no attention backend was given to install")


def check_backend(model: nn.Module, choice: AttentionChoice, **options: Any) -> CheckResult:
    """Install `choice` and return the result of `check_isolation` with it, with these options.

    Raises:
        torch.OutOfMemoryError: the check did not fit into memory, which says nothing about leaks.
    """

    def check() -> IsolationReport:
        install_attention(model, choice)
        return check_isolation(model, attention=str(choice), **options)

    return attempt(check)


def _with_reason(
    choice: AttentionChoice, choices: Sequence[AttentionChoice], failed: Sequence[CheckResult]
) -> AttentionChoice:
    """Return `choice` with the failures of the first of `choices` as its reason."""
    reasons = [f"{c.backend} {_in_short(f)}" for c, f in zip(choices, failed, strict=False)]
    return replace(choice, reason="; ".join(reasons)) if reasons else choice


def _in_short(result: CheckResult) -> str:
    if isinstance(result, Refusal):
        return f"refused ({result.error[:80]})"
    where = " with images" if "image" in result.probe else ""
    leaks = result.verdict == "leaks"
    return f"leaks by {result.difference:.2g}{where}" if leaks else f"{result.verdict}{where}"


_VERDICTS = ("isolated", "inconclusive", "leaks", "refused", NOT_FINITE)

# Seconds that a rank whose forward raised waits for the others. They may hang in that forward,
# where a sharded model gathers its weights, until the timeout of the process group.
_PATIENCE = 60.0


def worst_of_ranks(result: CheckResult) -> CheckResult:
    """Return `result`, or a worse one of another rank: ranks that disagree wait for ever.

    Raises:
        RuntimeError: this rank's forward raised, and the others do not answer.
    """
    mine = _VERDICTS.index(result.verdict)
    patience = _PATIENCE if isinstance(result, Refusal) else None
    try:
        worst = all_reduce_max(mine, patience=patience)
    except RuntimeError as error:
        if patience is None:
            raise
        raise RuntimeError(
            f"the isolation check raised {result} on this rank, and the others do not answer: they "
            "wait for it in a forward of the sharded model"
        ) from error
    if worst == mine:
        return result
    if isinstance(result, Refusal) or _VERDICTS[worst] in ("refused", NOT_FINITE):
        stage = NOT_FINITE if _VERDICTS[worst] == NOT_FINITE else PACKED
        return Refusal("another rank refuses it, and says why", stage)
    return replace(result, verdict=_VERDICTS[worst], probe="on another rank than this")


# --- the verdict on a run, for its report ---------------------------------------------------------


NO_MODEL = "a preview loads no model; trl-packing verify checks one"
_NOT_YET = "train() checks before its first step"
_OFF = "isolation_check='off'"
_PADDED = "rows are padded, as in TRL"
_WARNED = "isolation_check='warn' trains all the same"
_INCONCLUSIVE = "trl-packing verify --dtype float32 sees more"


@dataclass(frozen=True)
class Checked:
    """The check of a run on its model, or the reason why there was none.

    Attributes:
        verdict: "isolated", "leaks" or "inconclusive", as in `IsolationReport`; "refused" where the
            model raised an error; "not checked".
        reason: why nothing was checked, or why the run goes on although the verdict is not
            "isolated".
        evidence: the numbers behind the verdict; None where nothing was measured.
        error: of a model that refuses packed rows.
    """

    verdict: str = "not checked"
    reason: str = NO_MODEL
    evidence: IsolationReport | None = None
    error: str = ""

    @classmethod
    def from_result(
        cls, result: CheckResult | None, *, isolation_check: str, pads: bool
    ) -> "Checked":
        """Return the words and numbers for the last check of a run.

        Args:
            result: of the check; None if there was none.
            isolation_check: the setting.
            pads: whether rows are padded because of `result`.
        """
        if result is None:
            return cls(reason=_OFF if isolation_check == "off" else _NOT_YET)
        if isinstance(result, Refusal):
            return cls(result.verdict, _PADDED, error=result.error)
        reasons = {"isolated": "", "leaks": _WARNED, "inconclusive": _INCONCLUSIVE}
        return cls(result.verdict, _PADDED if pads else reasons[result.verdict], result)

    def __str__(self) -> str:
        if self.error:
            return f"{self.reason}: the model refuses packed ones ({self.error})"
        if self.evidence is None:
            return f"nothing ({self.reason})"
        numbers = (
            f"differs by {brief(self.evidence.difference)}, rounding allows "
            f"{brief(self.evidence.allowed)}, a leak would be {brief(self.evidence.leak)}"
        )
        if self.reason == _PADDED:
            return f"{_PADDED}, for documents would LEAK into each other: {numbers}"
        word = VERDICTS[self.verdict].removeprefix("documents are ")
        return f"{word}: {numbers}" + f"; {self.reason}" * bool(self.reason)


def brief(number: float) -> str:
    """Return a number of any size in a few characters.

    Example:
        >>> brief(0.0), brief(0.00068), brief(0.25), brief(20.3)
        ('0', '7e-4', '0.25', '20')
    """
    if number and abs(number) < 0.01:
        digits, exponent = f"{number:.0e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{number:.2g}" if abs(number) < 100 else f"{number:,.0f}"
