"""Count the places at which the host waits for the device, on a machine without one.

Tensors of a batch, parameters, and whatever is computed from them count as the device's (`marked`).
Each of the following on such a tensor is a wait, and would be one on CUDA:

    item, tolist, numpy, cpu, int(), float(), bool()      a value goes to the host
    nonzero, unique, masked_select, x[mask], equal, ...   the host must learn a size or an answer
    x.to(device), torch.tensor(..., device=device)        a blocking copy to the device
    `wait_for`                                            asked for

A wait belongs to the package of the innermost frame that is not torch's, accelerate's or NumPy's;
one inside the autograd engine without such a frame belongs to "autograd".
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_VALUES = (
    "item", "tolist", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__",
    "__contains__",
)  # fmt: skip
_SIZES = (
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "_local_scalar_dense", "is_nonzero", "bincount", "masked_scatter_backward",
)  # fmt: skip
_MADE = ("tensor", "zeros", "ones", "full", "empty", "arange", "rand", "randn")
_PASSED_OVER = ("torch", "accelerate", "numpy")
_OURS = "trl_packing"


class Waits(TorchDispatchMode):
    """Counts waits by (optimizer step, owner); `sites` says where ours and autograd's are."""

    def __init__(self):
        super().__init__()
        self.marked = WeakIdKeyDictionary()
        self.step: int | None = None  # nothing is counted without
        self.counts: Counter = Counter()
        self.sites: Counter = Counter()

    def mark(self, *trees) -> None:
        for leaf in tree_leaves(trees):
            if isinstance(leaf, torch.Tensor):
                self.marked[leaf] = True

    def on_device(self, *trees) -> bool:
        return any(isinstance(x, torch.Tensor) and x in self.marked for x in tree_leaves(trees))

    def wait(self, what: str) -> None:
        if self.step is None:
            return
        owner, site = _owner()
        if owner is None:
            return
        self.counts[self.step, owner] += 1
        if owner in (_OURS, "autograd"):
            self.sites[f"{what} at {site}"] += 1

    def of(self, owner: str) -> list[int]:
        """Return the waits of an owner in each step that had any."""
        return [n for (_, who), n in sorted(self.counts.items()) if who == owner]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        is_device = self.on_device(args, kwargs)
        if is_device:
            masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) and x in self.marked
                for x in args[1]
            )
            sized = name == "repeat_interleave" and kwargs.get("output_size") is None
            if masks or sized or name in _SIZES:
                self.wait(name)
        result = func(*args, **kwargs)
        if is_device:
            self.mark(result)
        return result


def _owner() -> tuple[str | None, str]:
    """Return whose frame called, and where; None for a loader's workers."""
    frame = sys._getframe(2)
    owner, site = None, ""
    while frame is not None:
        path = frame.f_code.co_filename
        if "torch/utils/data" in path:
            return None, ""
        if owner is None and frame.f_code.co_name == "_engine_run_backward":
            owner, site = "autograd", "the backward of a built-in function"
        if owner is None and path != __file__ and not any(f"/{p}/" in path for p in _PASSED_OVER):
            owner = _OURS if f"/{_OURS}/" in path else path
            site = f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return owner, site


@contextmanager
def counted_waits(monkeypatch) -> Iterator[Waits]:
    """Count what waits inside, with CPU tensors taken for a device's by the project too."""
    waits = Waits()
    in_flight = []

    def watched(name, original):
        def call(self, *args, **kwargs):
            if waits.on_device(self):
                waits.wait(name)
            return original(self, *args, **kwargs)

        return call

    def sent(self, *args, **kwargs):
        targets = [x for x in (*args, kwargs.get("device")) if isinstance(x, (str, torch.device))]
        if targets and not kwargs.get("non_blocking") and not waits.on_device(self):
            waits.wait("to")
        result = to(self, *args, **kwargs)
        if targets:
            waits.mark(result)
        if any(torch.device(target).type == "cpu" for target in targets):
            in_flight.append(result)  # read before the device is waited for, it waits
        return result

    def waited(device):
        waits.wait("wait_for")
        for tensor in in_flight:
            waits.marked.pop(tensor, None)
        in_flight.clear()

    def made(name, original):
        def make(*args, **kwargs):
            result = original(*args, **kwargs)
            if kwargs.get("device") is not None:
                waits.mark(result)
                if name == "tensor":
                    waits.wait(name)
            return result

        return make

    to = torch.Tensor.to
    for name in _MADE:
        monkeypatch.setattr(torch, name, made(name, getattr(torch, name)))
    for name in _VALUES:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch.Tensor, "to", sent)
    monkeypatch.setattr("trl_packing.training.metrics.wait_for", waited)
    for module in ("documents.host_row", "loss.lm_head"):
        monkeypatch.setattr(f"trl_packing.{module}.is_cpu", lambda tensor: False)
    monkeypatch.setattr("trl_packing.documents.host_row.keeps_source", lambda device: True)
    with waits:
        yield waits
