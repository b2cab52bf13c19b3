"""Every architecture that transformers knows, trained packed by the real trainer and judged.

    reference   each document alone through the untouched model; losses summed, divided by the
                trained tokens of the step
    packed      the same documents, one optimizer step of `PackedSFTTrainer`
    by TRL      the same row as TRL packs it, through the untouched model: what packing does that
                trusts every model (the negative control: leaking models must be seen to leak)

A difference without an error or a warning is *silent*, and what the matrix exists to find. The
tolerance is what rounding may do: `NOISE_FACTOR` times how far the reference itself moves when each
module rounds otherwise, and at least 1e-5 of the largest value.
"""

import contextlib
import copy
import io
import multiprocessing
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from trl_packing.config import PackedSFTConfig
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.measure import NOISE_FACTOR, rounded_otherwise
from trl_packing.models.introspection import requires
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.tiny_models import NotBuilt, tiny_model
from trl_packing.trainer import PackedSFTTrainer

# Tokens a document: on both sides of every length constant of the tiny models (8 to 32).
LENGTHS = (47, 5, 23, 38, 12, 60, 3, 29)
MAX_LENGTH = 80

#: Ways that keep documents in one row; the others run padded rows of the same documents.
PACKED_WAYS = ("documents", "varlen", "model", "mask")

_LEAST_TOLERANCE = 1e-5
_MOST_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What one architecture did, and by how much it was wrong.

    `outcome` is ``"exact"``, ``"differs"`` (in silence: what must not be), ``"refused"`` (with a
    message), ``"not built"`` or ``"error"``. Errors are relative to the largest value of one
    document at a time; `way` is the attention backend; `by_trl` says what TRL's padding-free batch
    does to this model: ``"exact"``, ``"differs"`` (by that much in log-probability) or
    ``"refuses"``.
    """

    name: str
    outcome: str
    way: str = ""
    logits_error: float = float("nan")
    loss_error: float = float("nan")
    gradient_error: float = float("nan")
    tolerance: float = float("nan")
    by_trl: str = ""
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_silent_difference(self) -> bool:
        return self.outcome in ("differs", "error")


def judge_architecture(name: str, **options: Any) -> Verdict:
    """Train one packed step of a tiny model of architecture `name`; compare it with the truth.

    `options` are of `PackedSFTConfig`: ``isolation_check="off"`` shows what the check is good for.
    """
    began = time.perf_counter()
    try:
        model = tiny_model(name)
        documents = tiny_documents()
        truth = one_at_a_time(model, documents)
    except NotBuilt as problem:
        return Verdict(name, "not built", reason=str(problem))
    except Exception as problem:
        return Verdict(name, "not built", reason=f"runs no document: {problem}".splitlines()[0])
    by_trl = _packed_by_trl(model, documents, truth)
    with tempfile.TemporaryDirectory() as folder:
        try:
            way, packed = packed_step(copy.deepcopy(model), documents, folder, **options)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
            reason = str(refusal).splitlines()[0]
            return Verdict(name, "refused", reason=reason, by_trl=by_trl, seconds=_since(began))
    errors = packed.distance(truth)
    tolerance = _tolerance(model, documents, truth)
    exact = all(error <= tolerance for error in errors)
    return Verdict(
        name,
        "exact" if exact else "differs",
        way.backend,
        *errors,
        tolerance,
        by_trl,
        _since(began),
        reason=way.reason,
    )


def judge_all(
    names: Sequence[str], *, processes: int = 2, seconds_each: int = 120
) -> Iterator[Verdict]:
    """Yield the verdict on each architecture, in order, from `processes` workers."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_quiet_worker) as pool:
        yield from pool.map(_Within(seconds_each), names)


class _Within:
    """Judge an architecture, or say that it took too long."""

    def __init__(self, seconds: int):
        self.seconds = seconds

    def __call__(self, name: str) -> Verdict:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(self.seconds)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return judge_architecture(name)
        except TimeoutError:
            return Verdict(name, "not built", reason=f"took longer than {self.seconds} s")
        except Exception as error:
            return Verdict(name, "error", reason=f"{type(error).__name__}: {error}"[:300])
        finally:
            signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError


def _quiet_worker() -> None:
    from datasets import disable_progress_bars
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity(logging.CRITICAL)
    disable_progress_bars()


def _since(began: float) -> float:
    return time.perf_counter() - began


# --- the table --------------------------------------------------------------------------------


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the counts that matter, a few lines."""
    exact = [v for v in verdicts if v.outcome == "exact"]
    packed = [v for v in exact if v.way in PACKED_WAYS]
    lost = [v.name for v in exact if v.by_trl == "exact" and v.way not in PACKED_WAYS]
    lines = [
        f"{len(verdicts)} architectures: {len(packed)} packed-exact, "
        f"{len(exact) - len(packed)} exact by padded rows, "
        f"{_count(verdicts, 'refused')} refused, {_count(verdicts, 'not built')} not built",
        f"silent differences: {sum(v.is_silent_difference for v in verdicts)}",
        f"packed by TRL: {sum(v.by_trl == 'exact' for v in verdicts)} exact, "
        f"{sum(v.by_trl.startswith('differs') for v in verdicts)} silent differences, "
        f"{sum(v.by_trl.startswith('refuses') for v in verdicts)} refused",
    ]
    if lost:
        lines.append(f"packed-exact in TRL, padded here: {', '.join(lost)}")
    return "\n".join(lines)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table, an architecture a row."""
    header = "architecture|outcome|way|logits|loss|gradients|may be|by TRL|seconds|why"
    lines = ["| " + " | ".join(header.split("|")) + " |", "| --- " * 10 + "|"]
    for v in verdicts:
        errors = (v.logits_error, v.loss_error, v.gradient_error, v.tolerance)
        numbers = ["" if e != e else f"{e:.0e}" for e in errors]
        reason = "" if v.way in PACKED_WAYS and v.outcome == "exact" else v.reason
        cells = [v.name, v.outcome, v.way, *numbers, v.by_trl, f"{v.seconds:.1f}", _cell(reason)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _count(verdicts: Sequence[Verdict], outcome: str) -> int:
    return sum(v.outcome == outcome for v in verdicts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:160]


# --- the truth --------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Logits of every document in data-set order, the step's loss, gradients by parameter."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]

    def distance(self, other: "Measured") -> tuple[float, float, float]:
        """Return the largest relative differences of logits, loss and gradients."""
        if self.gradients.keys() != other.gradients.keys():
            missing = self.gradients.keys() ^ other.gradients.keys()
            raise RuntimeError(f"one run alone has gradients of {sorted(missing)[:3]}")
        scale = max((float(g.abs().max()) for g in other.gradients.values()), default=1.0)
        gradients = (float((self.gradients[n] - g).abs().max()) for n, g in other.gradients.items())
        return (
            float((self.logits - other.logits).abs().max() / other.logits.abs().max()),
            abs(self.loss - other.loss) / abs(other.loss),
            max(gradients, default=0.0) / scale,
        )


def tiny_documents(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """Return documents of random tokens, a third of each a prompt that is not trained."""
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        ids = rng.integers(10, 110, length).tolist()
        prompt = length // 3
        made.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]})
    return made


def one_at_a_time(model: Any, documents: Sequence[dict[str, list[int]]]) -> Measured:
    """Return what the untouched model says and learns, each document alone in a fresh copy."""
    num_trained = sum(label != IGNORE_INDEX for d in documents for label in d["labels"][1:])
    logits, loss = [], 0.0
    gradients: dict[str, Any] = {}
    for document in documents:
        # A copy each: some ropes remember the longest document that they have seen.
        alone = copy.deepcopy(model).train()
        ids, labels = (torch.tensor(document[key])[None] for key in ("input_ids", "labels"))
        positions = {"position_ids": torch.arange(ids.shape[1])[None]}
        needed = positions if requires(alone, "position_ids") else {}
        output = alone(input_ids=ids, use_cache=False, **needed).logits
        nll = F.cross_entropy(output[0, :-1].float(), labels[0, 1:], reduction="sum") / num_trained
        nll.backward()
        logits.append(output[0].detach().float())
        loss += nll.item()
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return Measured(torch.cat(logits), loss, gradients)


def _tolerance(model: Any, documents: Sequence[dict[str, list[int]]], truth: Measured) -> float:
    """Return how far rounding alone may move the truth, relatively."""
    rounded = copy.deepcopy(model)
    with rounded_otherwise(rounded):
        moved = one_at_a_time(rounded, documents)
    return min(max(_LEAST_TOLERANCE, NOISE_FACTOR * max(moved.distance(truth))), _MOST_TOLERANCE)


# --- packed -----------------------------------------------------------------------------------


class _Keep(TrainerCallback):
    """Keep the gradients of the only optimizer step."""

    gradients: dict[str, Tensor]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }


def packed_step(
    model: Any, documents: Sequence[dict[str, list[int]]], folder: str, **options: Any
) -> tuple[Any, Measured]:
    """Train `documents` in one optimizer step of packed micro-batches; `options` are config's."""
    kept = _Keep()
    trainer = PackedSFTTrainer(
        model,
        PackedSFTConfig(
            **{
                "output_dir": folder,
                "max_length": MAX_LENGTH,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_steps": 1,
                "learning_rate": 0.0,
                "max_grad_norm": 0.0,
                "logging_steps": 1,
                "gradient_checkpointing": False,
                "bf16": False,
                "use_cpu": True,
                "router_aux_loss_coef": None,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                **options,
            }
        ),
        train_dataset=Dataset.from_list(list(documents)),
        processing_class=tiny_tokenizer(),
        callbacks=[kept],
    )
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    batch = PackedCollator()(documents)
    batch.pop("labels")
    with torch.no_grad():
        logits = trainer.model.train()(**batch).logits[0].float()
    return trainer.attention, Measured(logits, loss, kept.gradients)


def _packed_by_trl(model: Any, documents: Sequence[dict[str, list[int]]], truth: Measured) -> str:
    """Return what TRL's padding-free batch and fused head make of the untouched model."""
    packed = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(list(documents))
    labels = packed["labels"][0, 1:]
    trained = (labels != IGNORE_INDEX).nonzero()[:, 0]
    expected = truth.logits[trained].log_softmax(-1).gather(-1, labels[trained, None])[:, 0]
    untouched = copy.deepcopy(model).train()
    add_fused_lm_head(untouched)
    try:
        with torch.no_grad():
            output = untouched(**packed, use_cache=False, fused_lm_head=True)
    except Exception as refusal:
        return f"refuses ({type(refusal).__name__})"
    found = output.log_probs[output.label_mask].float()
    difference = float((found - expected).abs().max())
    return "exact" if difference <= 1e-3 else f"differs ({difference:.1g})"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that no document needs: the trainer asks for its pad and eos tokens."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 2, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
