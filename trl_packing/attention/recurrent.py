"""Keeps documents apart in what carries a state along the row: convolutions, scans, delta rules.

    functions   those of transformers that kernels may replace (`causal_conv1d_fn`, ...): they get
                the boundaries if the installed kernel takes them, else they run by document
    modules     found by measuring (isolation/mixing.py): they run by document

Everything else sees the whole row. Documents of similar length share a call as a small batch, in
which a causal function never reads the cells behind a document:

    projections   [a a a a a b b c c c c]
    function      [a a a a a]   [b b]
                  [c c c c .]
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trl_packing.attention.calls import (
    Call,
    Forward,
    packed_row,
    packed_way,
    refuse_recomputation,
    run_again_inside,
    wrap_packed_calls,
)
from trl_packing.attention.model_facts import temporarily
from trl_packing.attention.padded_rows import group_documents, rows_of
from trl_packing.documents.host_row import (
    BOUNDARIES,
    host_boundaries,
    host_values,
    is_cpu,
    to_device,
)

NAME = "by_document"

# Tokens of a chunk of a scan in PyTorch; on CPUs, more only cost time and memory.
_CHUNK = 32


class Layout(NamedTuple):
    """The documents of a row as small batches.

    `tokens` are the tokens of all batches, one after another, and `shapes` the documents and the
    longest length of each. The tokens of the row are `cells` among their outputs.
    """

    tokens: Tensor
    shapes: list[tuple[int, int]]
    cells: Tensor

    def split(self, value: Tensor, dim: int) -> list[Tensor]:
        """Return the batches of `value` ``(1, ...)``, whose tokens are in `dim`."""
        # One gather, whose backward is one sum over the row.
        flat = value.movedim(dim, 1).squeeze(0).index_select(0, self.tokens)
        parts = flat.split([documents * longest for documents, longest in self.shapes])
        return [
            part.unflatten(0, shape).movedim(1, dim)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Return the outputs of all batches, their tokens in `dim`, as those of the row."""
        flat = [part.movedim(dim, 1).flatten(0, 1) for part in parts]
        return torch.cat(flat).index_select(0, self.cells)[None].movedim(1, dim)


@functools.lru_cache(maxsize=8)  # the layers of a row share it
@torch.inference_mode(False)  # a backward may save it later
def _layout(boundaries: tuple[int, ...], device: torch.device, equal_lengths: bool) -> Layout:
    shapes = []
    tokens = []
    real = []
    cells = []
    num_cells = 0
    for group in group_documents(boundaries, equal_lengths=equal_lengths):
        rows = rows_of(group, np.array(boundaries), None)
        shapes.append((len(rows.token), rows.token.shape[1]))
        tokens.append(rows.token.flatten().numpy())
        real.append(rows.real_tokens)
        cells.append(num_cells + rows.real)
        num_cells += rows.token.numel()
    order = np.argsort(np.concatenate(real))
    return Layout(
        to_device(np.concatenate(tokens), device),
        shapes,
        to_device(np.concatenate(cells)[order], device),
    )


class RecurrentFunction:
    """A function of transformers, run on the documents of a packed row."""

    def __init__(self, function: Callable[..., Any], facts: Mapping[str, Any]):
        self.function = function
        self.name = facts["func_name"]
        self.package = facts["package"]
        self.is_kernel = facts["is_new_implementation"]
        self.is_convolution = self.name == "causal_conv1d_fn"
        # Names of the arguments of the kernel that is installed.
        self.arguments = facts["applicable_params"] if self.is_kernel else ()
        self._dims: dict[Any, int] = {}  # the dimension of tokens, by argument
        self._is_missing = False  # only a kernel computes it: without one, it returns None

    def __call__(self, row: Mapping[str, Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what the function returns for a row, each document by itself."""
        if row.get("key_index") is not None:
            raise NotImplementedError(
                f"{self.name} carries a state along the row, whose documents share prefixes "
                "(key_index); set prefix_sharing='off'"
            )
        # The boundaries under the names that the installed kernel has for them.
        if "seq_idx" in self.arguments and "seq_idx" in row:
            taken = {"seq_idx": row["seq_idx"]}
        else:
            taken = {n: x for n, x in _for_fla(row).items() if n in self.arguments}
        if taken:
            if self.is_convolution:  # channels last, without which it takes no boundaries
                args = (args[0].transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
            return self.function(*args, **kwargs | taken)
        if self.is_convolution and not is_cpu(args[0]) and (triton := _convolution_of_fla()):
            return self._by_triton(triton, row, args, kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in _OF_KERNELS}
        if not self.is_kernel and kwargs.get("chunk_size", 0) > _CHUNK:
            kwargs["chunk_size"] = _CHUNK
        return self._by_document(row, args, kwargs)

    def _by_triton(
        self,
        triton: Callable[..., Any],
        row: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return a short convolution by FLA's kernel, which needs no compiler to be installed."""
        given = inspect.signature(self.function).bind(*args, **kwargs).arguments
        x = given["hidden_states"].transpose(1, 2)  # (1, T, channels)
        weight = given["weight"]
        found, _state = triton(
            x.to(weight.dtype),
            weight,
            bias=given.get("bias"),
            activation=given.get("activation"),
            **_for_fla(row),
        )
        return found.transpose(1, 2).to(x.dtype)

    @torch.compiler.disable
    def _by_document(
        self, row: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        boundaries = tuple(host_boundaries(row["cu_seq_lens_q"]))
        given = dict(enumerate(args)) | kwargs
        dims = {}
        for name, value in given.items():
            dim = self._dim_of_tokens(name, value, (1, boundaries[-1]))
            if dim is not None:
                dims[name] = dim
        if not dims or len(boundaries) == 2 or self._is_missing:
            return self.function(*args, **kwargs)
        name, first = next(iter(dims.items()))
        layout = _layout(boundaries, given[name].device, False)
        parts = {name: layout.split(given[name], dim) for name, dim in dims.items()}
        outputs = []
        for batch in range(len(layout.shapes)):
            part: dict[Any, Any] = given | {name: found[batch] for name, found in parts.items()}
            positional = [part.pop(i) for i in range(len(args))]
            outputs.append(self.function(*positional, **part))
        if isinstance(outputs[0], tuple):
            values, *states = zip(*outputs, strict=True)
            if any(state is not None for of_batches in states for state in of_batches):
                raise NotImplementedError(f"{self.name} returns states of documents")
            return self._joined(list(values), layout, first), *[None] * len(states)
        return self._joined(outputs, layout, first)

    def _joined(self, parts: list[Any], layout: Layout, dim_of_input: int) -> Tensor | None:
        if parts[0] is None:
            self._is_missing = True
            return None
        dim = self._dim_of_tokens("the output", parts[0], layout.shapes[0], dim_of_input)
        assert dim is not None, f"{self.name} returns no values of tokens"
        return layout.join(parts, dim)

    def _dim_of_tokens(
        self, name: Any, value: Any, shape: tuple[int, int], likely: int | None = None
    ) -> int | None:
        """Return the dimension of a value that holds the tokens of documents, None without one.

        `shape` has documents and tokens. Where another dimension is as long by chance, it is that
        of earlier rows, or the `likely` one.
        """
        documents, tokens = shape
        if not torch.is_tensor(value) or value.shape[:1] != (documents,):  # such as weights
            return None
        dims = [dim for dim in range(1, value.dim()) if value.shape[dim] == tokens]
        if len(dims) == 1:
            self._dims.setdefault(name, dims[0])
        if dims and name in self._dims:
            return self._dims[name] if self._dims[name] in dims else None
        if likely in dims:
            return likely
        if dims:
            raise NotImplementedError(
                f"{self.name}: which dimension of {tuple(value.shape)} are the tokens? Set "
                "attention='padded'"
            )
        return None


def _for_fla(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the boundaries as FLA takes them; without a copy on the CPU, it waits for a GPU."""
    boundaries = row["cu_seq_lens_q"]
    return {
        "cu_seqlens": boundaries,
        "cu_seqlens_cpu": torch.from_numpy(host_values(boundaries)),
    }


@functools.lru_cache(maxsize=1)
def _convolution_of_fla() -> Callable[..., Any] | None:
    """Return the Triton convolution of flash-linear-attention, None if it cannot be imported."""
    try:
        return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except Exception:
        return None


# Arguments of kernels that functions in PyTorch refuse or ignore.
_OF_KERNELS = {*BOUNDARIES, "cu_seqlens", "cu_seqlens_cpu"}


def take_documents(model: nn.Module) -> list[RecurrentFunction]:
    """Make recurrent functions of `model` keep documents apart in packed calls; return them."""
    found = []
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    for module_name in sorted(names & sys.modules.keys()):
        if module_name.startswith("torch."):
            continue
        namespace = vars(sys.modules[module_name])
        for name, value in list(namespace.items()):
            if not (inspect.isfunction(value) or isinstance(value, nn.Module)):
                continue
            if not hasattr(value, "recurrent") and (facts := _facts(value)):
                namespace[name] = value = _keep_apart(RecurrentFunction(value, facts))
            if hasattr(value, "recurrent"):
                found.append(value.recurrent)
    return found


def describe(model: nn.Module, device: str) -> str | None:
    """Return how recurrent functions of `model` run on a kind of device, None without any."""
    # Of functions that only decode, too.
    missing = {recurrent.package for recurrent in take_documents(model) if not recurrent.is_kernel}
    if missing and device != "cuda":
        return "recurrent layers by document"
    if "causal_conv1d" in missing and _convolution_of_fla():
        missing.remove("causal_conv1d")
    if not missing:
        return None
    packages = sorted({DISTRIBUTIONS[name] for name in missing if name in DISTRIBUTIONS})
    return f"recurrent layers by document; pip install {' '.join(packages)} for kernels"


# What to install, by the package that transformers looks for. The convolution of causal-conv1d is
# in flash-linear-attention too, which needs no compiler.
DISTRIBUTIONS = {
    "causal_conv1d": "flash-linear-attention",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}


_FACTS = {"func_name", "package", "is_new_implementation", "applicable_params"}


def _facts(function: Any) -> Mapping[str, Any] | None:
    """Return what transformers knows of a function that a kernel may replace, else None."""
    if isinstance(function, nn.Module):  # made by the package `kernels`
        function = inspect.getclosurevars(type(function).forward).nonlocals.get("func")
    if not hasattr(function, "__wrapped__"):
        return None
    facts = inspect.getclosurevars(function).nonlocals
    return facts if set(facts) >= _FACTS else None


def _keep_apart(recurrent: RecurrentFunction) -> Callable[..., Any]:
    @functools.wraps(recurrent.function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        row = packed_row()
        if row is not None:
            return recurrent(row, args, kwargs)
        refuse_recomputation(args[0])
        return recurrent.function(*args, **kwargs)

    apart.recurrent = recurrent  # type: ignore[attr-defined]
    return apart


def run_parts_by_document(model: nn.Module, kind: type) -> None:
    """Run modules of a class inside packed calls of `model` by document from now on.

    One with parts whose weights FSDP2 gathers stays whole: ranks would gather unequally often.
    """
    for module in model.modules():
        gathers = any(isinstance(p, FSDPModule) for p in module.modules() if p is not module)
        if type(module) is kind and not gathers:
            wrap_packed_calls(module, _run_by_document, attention=NAME, is_part=True)


def run_parts_whole(model: nn.Module) -> None:
    """Undo `run_parts_by_document` for all classes."""
    for module in model.modules():
        way = packed_way(module)
        if way is not None and way.is_part:
            wrap_packed_calls(module, None)


def _run_by_document(
    module: nn.Module,
    forward: Forward,
    arguments: Call,
    row: Mapping[str, Any],
) -> Any:
    """Run a module inside a packed call on each document by itself."""
    if row.get("key_index") is not None:
        raise NotImplementedError("a module by document takes no shared prefixes (key_index)")
    boundaries = tuple(host_boundaries(row["cu_seq_lens_q"]))
    dropped = _OF_KERNELS - {"position_ids"}  # those of the row are not those of the batches
    given = {k: v for k, v in arguments.items() if k not in dropped}
    # A cell behind a document is its last token again, which a mask would show twice.
    has_mask = any(_is_mask(value, boundaries[-1]) for value in given.values())
    device = next(value.device for value in given.values() if torch.is_tensor(value))
    layout = _layout(boundaries, device, has_mask)
    parts = {name: _parts(value, layout, boundaries[-1]) for name, value in given.items()}
    outputs = []
    for batch in range(len(layout.shapes)):
        outputs.append(forward(**{name: values[batch] for name, values in parts.items()}))
    return _joined_output(outputs, layout)


def _is_mask(value: Any, tokens: int) -> bool:
    return torch.is_tensor(value) and value.shape[2:] == (tokens, tokens)


def _parts(value: Any, layout: Layout, num_tokens: int) -> list[Any]:
    """Return what an argument of a module has of the documents of each batch."""
    if isinstance(value, (tuple, list)):
        return list(zip(*[_parts(each, layout, num_tokens) for each in value], strict=True))
    if not torch.is_tensor(value):
        return [value] * len(layout.shapes)
    if _is_mask(value, num_tokens):
        found = []
        for rows in layout.split(torch.arange(num_tokens, device=value.device)[None], 1):
            found.append(value[0][:, rows[:, :, None], rows[:, None]].movedim(1, 0))
        return found
    if value.shape[:2] == (1, num_tokens):
        return layout.split(value, 1)
    if value.shape[1:3] == (1, num_tokens):  # positions in several dimensions, (axes, 1, T)
        return [part.transpose(0, 1) for part in layout.split(value.transpose(0, 1), 2)]
    return [value] * len(layout.shapes)


def _joined_output(outputs: list[Any], layout: Layout) -> Any:
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        parts = zip(*outputs, strict=True)
        return tuple(_joined_output(list(part), layout) for part in parts)
    if torch.is_tensor(first) and first.shape[:2] == layout.shapes[0]:
        return layout.join(outputs, 1)
    return None  # a state of documents, or nothing


def run_again_as_packed(module: nn.Module, forward: Forward, arguments: Call) -> Any:
    """Run a packed call, and the layers that gradient checkpointing runs again, as packed."""
    if not torch.is_grad_enabled():  # no backward runs anything again
        return forward(**arguments)
    run_again = run_again_inside()
    with ExitStack() as stack:
        for holder in module.modules():
            for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
                if name in vars(holder):
                    run = functools.partial(run_again, getattr(holder, name))
                    stack.enter_context(temporarily(holder, **{name: run}))
        return forward(**arguments)
