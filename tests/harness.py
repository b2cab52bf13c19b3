"""The oracle of the tests: documents one at a time through plain transformers, and what a run gave.

    model = tiny_model("llama")
    expected = alone(model, documents)                  loss, gradients, losses of tokens
    found = run(model, documents, folder, max_length=80)
    assert_exact(found, expected)

`alone` knows nothing of rows: each document goes through the untouched model as an ordinary batch,
once in float32 and once in float64. `assert_exact` holds a result to the float64 one. It allows a
few times the error of documents alone in float32 and a few units in the last place, so no
processor, number of threads or set of instructions is written into a bound. A fault (a leak, a
wrong weight, position or label) is hundreds of times larger, which the negative controls show.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from trl import SFTConfig

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX

#: How many times the error of documents alone in float32 explains: sums in another order.
FACTOR = 4
#: Half the distance of two float32 numbers, relative.
ROUNDING = 2.0**-24
#: Units that are allowed beside it: an error of documents alone can be zero by chance.
UNITS = 32
#: Relative distance of two float32 runs that take the same sums in another order; a fault is
#: hundreds of times larger. `assert_exact` is the better comparison where there are gradients.
TWO_RUNS = 500 * ROUNDING
#: Where rounding explains more than this, relative, a comparison shows nothing.
MOST = 1e-2

SMOOTHING = 0.1
#: Settings of a trainer that reports and saves nothing.
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
}
Gradients = dict[str, Tensor]


class Step(NamedTuple):
    """The loss of a step, its gradients, and the losses and weights of its trained tokens."""

    loss: float
    gradients: Gradients
    losses: Tensor
    weights: Tensor


class Alone:
    """A step of documents one at a time, in float32 and, where it is asked for, in float64.

    Unpack it as loss and gradients in float32.
    """

    def __init__(self, step_in: Callable[[torch.dtype], Step]) -> None:
        self._step_in = step_in
        self.rounded = step_in(torch.float32)

    @functools.cached_property
    def exact(self) -> Step:
        return self._step_in(torch.float64)

    def __getitem__(self, at: int) -> Any:
        return self.rounded[:2][at]

    def bound_of_loss(self) -> float:
        """Return how far rounding takes the loss from that of float64.

        It goes by the errors of single tokens: those of their sum may cancel by chance.
        """
        errors = (self.rounded.losses.double() - self.exact.losses).abs()
        weights = self.exact.weights
        spread = float((errors * weights).sum() / weights.sum()) if weights.sum() else 0.0
        return bound_of(self.exact.loss, spread)

    def bounds_of_gradients(self) -> dict[str, float]:
        """Return how far, as a norm, rounding takes each gradient from that of float64."""
        whole = norm(self.exact.gradients.values())
        bounds = {
            # A gradient of zero is the difference of others: a unit of all of them.
            name: bound_of(norm([gradient]), norm([self.rounded.gradients[name] - gradient]))
            + ROUNDING * whole
            for name, gradient in self.exact.gradients.items()
        }
        total = norm(map(torch.tensor, bounds.values()))
        assert total <= MOST * whole, f"rounding explains {total} of {whole}: this shows nothing"
        return bounds


def bound_of(value: float, error: float) -> float:
    """Return how far a result may be from a `value` of float64 that float32 misses by `error`."""
    return FACTOR * error + UNITS * ROUNDING * abs(value)


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


class InDouble(TorchFunctionMode):
    """Compute in float64 what models compute in float32 on purpose: norms, softmax, ropes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widened(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(widened, args), **named)


def losses_of_tokens(logits: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Return the loss of each token: "nll", "smoothed" or "dft"."""
    if "dft" in loss:
        nll = F.cross_entropy(logits, targets, reduction="none")
        return nll * (-nll).exp().detach()
    smoothing = SMOOTHING if loss == "smoothed" else 0.0
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def as_batch(document: dict[str, Any]) -> dict[str, Tensor]:
    """Return an ordinary batch of one document, with its labels."""
    ids, labels = (torch.tensor(document[key])[None] for key in ("input_ids", "labels"))
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.shape[1])[None]}


def alone(
    model: Any,
    documents: Iterable[dict[str, Any]],
    loss: str = "nll",
    weighting: str = "token",
    *,
    collate: Callable[[dict[str, Any]], dict[str, Tensor]] = as_batch,
) -> Alone:
    """Return Σ w · loss of a token / Σ w and its gradients, each document by itself.

    Args:
        model: is left as it was.
        documents: with `input_ids` and `labels`, perhaps `loss_weights` and `loss_weight`; or what
            `collate` makes a batch with labels of.
        loss: "nll", "smoothed" or "dft".
        weighting: `loss_weighting` of the config.
    """
    untouched = copy.deepcopy(model).train()
    documents = list(documents)

    def step_in(dtype: torch.dtype) -> Step:
        with in_dtype(untouched, dtype) as ready:
            return _mean_over_documents(ready, documents, loss, weighting, collate, dtype)

    return Alone(step_in)


@contextlib.contextmanager
def in_dtype(model: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Give a copy of `model` that computes in float32 as it is, or all in float64."""
    model = copy.deepcopy(model)
    if dtype == torch.float32:
        yield model
        return
    for module in model.modules():
        if hasattr(module, "config"):  # the grouped product of experts knows no float64
            module.config._experts_implementation = "eager"
    with InDouble():
        yield model.double()


def _mean_over_documents(model, documents, loss, weighting, collate, dtype) -> Step:
    losses, weights = [], []
    for document in documents:
        batch = dict(collate(document))
        labels = batch.pop("labels")[0]
        trained = labels[1:] != IGNORE_INDEX
        own = torch.tensor(document.get("loss_weights", [1.0] * len(labels)), dtype=torch.float64)
        own = own[1:][trained]
        divisor = {"token": 1.0, "document": float(own.sum()), "sqrt": float(own.sum()) ** 0.5}
        weights.append(own * (document.get("loss_weight", 1.0) / (divisor[weighting] or 1.0)))
        inputs = {n: v.to(dtype) if torch.is_floating_point(v) else v for n, v in batch.items()}
        logits = model(**inputs, use_cache=False).logits[0]
        # Prompt tuning puts virtual tokens before the document.
        logits = logits[-len(labels) : -1][trained].to(dtype)
        losses.append(losses_of_tokens(logits, labels[1:][trained], loss))
    flat, weight = torch.cat(losses), torch.cat(weights)
    value = (flat * weight.to(dtype)).sum() / weight.sum()
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(value.item(), gradients, flat.detach(), weight)


def assert_exact(found: Any, expected: Alone) -> None:
    """Hold loss and gradients of `found` (its first two fields) to documents one at a time."""
    loss, gradients = found[0], found[1]
    assert abs(loss - expected.exact.loss) <= expected.bound_of_loss(), (loss, expected.exact.loss)
    wanted = expected.exact.gradients
    bounds = expected.bounds_of_gradients()
    assert norm(wanted.values()) > 0
    for name in gradients.keys() | wanted.keys():
        assert name in gradients, f"{name} has no gradient"
        if name not in wanted:  # of a part that no document reached alone
            assert not gradients[name].any(), name
            continue
        apart = norm([gradients[name].double() - wanted[name]])
        assert apart <= bounds[name], f"{name}: {apart} apart, rounding explains {bounds[name]}"


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Return ‖found − expected‖ / ‖expected‖ over all gradients."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = norm(found[name].double() - gradient for name, gradient in expected.items())
    return apart / norm(expected.values())


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run gave: iterate it for its first loss and the gradients of its last step."""

    trainer: Any
    gradients: Gradients
    batches: list[list[Any]] = field(default_factory=list)  # of each step

    @property
    def losses(self) -> list[float]:
        """The logged losses of training."""
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    def __getitem__(self, at: int) -> Any:
        return (self.losses[0], self.gradients)[at]


def make_trainer(
    folder: Any,
    rows: Any,
    model: Any = "llama",
    *,
    cls: type = PackedSFTTrainer,
    tokenizer: Any = None,
    evaluated: Any = None,
    collator: Any = None,
    callbacks: Iterable[Any] = (),
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return a trainer on the CPU, in float32, that reports and saves nothing unless asked.

    Args:
        folder: its `output_dir`.
        rows: a list, a data set or a stream.
        model: a name of `tiny_model`, or a model.
        cls: `PackedSFTTrainer`, a subclass, or `SFTTrainer`.
        tokenizer: `tiny_tokenizer()` by default.
        evaluated: `eval_dataset`.
        collator: `data_collator`.
        callbacks: of the trainer.
        arguments: further arguments of the trainer.
        settings: of its config.
    """
    config = PackedSFTConfig if issubclass(cls, PackedSFTTrainer) else SFTConfig
    return cls(
        tiny_model(model) if isinstance(model, str) else model,
        config(**QUIET | {"output_dir": str(folder)} | settings),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=evaluated,
        processing_class=tokenizer or tiny_tokenizer(),
        data_collator=collator,
        callbacks=list(callbacks),
        **(arguments or {}),
    )


def run(
    model: Any,
    documents: Any,
    folder: Any,
    *,
    callbacks: Iterable[Any] = (),
    keep: Callable[[Any], Any] = dict,
    **options: Any,
) -> Run:
    """Train a copy of `model`, one step unless `options` of `make_trainer` say otherwise.

    The result has what `keep` makes of each micro-batch.
    """
    kept = Keep()
    batches = []

    class Watched(options.pop("cls", PackedSFTTrainer)):
        def get_batch_samples(self, *args, **kwargs):
            samples, num_items = super().get_batch_samples(*args, **kwargs)
            batches.append([keep(sample) for sample in samples])
            return samples, num_items

    options = {**ONE_STEP, "max_length": 80, "per_device_train_batch_size": 8, **options}
    trainer = make_trainer(
        folder,
        documents,
        copy.deepcopy(model),
        cls=Watched,
        callbacks=[kept, *callbacks],
        **options,
    )
    trainer.train()
    return Run(trainer, kept.gradients, batches)
