"""recognition.calls"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_packing.recognition.current_row import complete_call


def complete_arguments(
    module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `module`; those of a packed row say so (current_row).

    `names` are those of its parameters, for arguments given by position.
    """
    if _in_a_packed_call or (torch.compiler.is_compiling() and _says_all(kwargs)):
        return args, kwargs
    named = dict(zip(names, args, strict=False)) | kwargs
    call = complete_call(module, named)
    return (args, kwargs) if call is named else ((), call)


def _says_all(kwargs: dict[str, Any]) -> bool:
    """Whether a call names its boundaries as kernels take them, with no mask and no cache."""
    return (
        kwargs.get("cu_seq_lens_q") is not None
        and kwargs.get("attention_mask") is None
        and isinstance(kwargs.get("max_length_q"), int)
        and kwargs.get("use_cache") is False
    )


# Whether a module is called by one that has been told of the row, on whatever it has made of it.
_in_a_packed_call = False


@contextmanager
def leave_inner_calls_alone() -> Iterator[None]:
    global _in_a_packed_call
    before, _in_a_packed_call = _in_a_packed_call, True
    try:
        yield
    finally:
        _in_a_packed_call = before
