"""Turns a module's forward into a function that also runs copies of the module."""

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def unbind_forward(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return `forward` of `module` as a function that takes the module as its first argument.

    A bound forward would run the weights of `module` even when it is called on a copy.
    """
    function = getattr(forward, "__func__", None)
    if function is not None and getattr(forward, "__self__", None) is module:
        return _follow_copies(function, module)
    if isinstance(forward, functools.partial) and forward.args[:1] == (module,):  # accelerate's
        first, given = forward.args[1:], forward.keywords
        return lambda self, *args, **kwargs: forward.func(self, *first, *args, **given, **kwargs)
    return lambda _self, *args, **kwargs: forward(*args, **kwargs)


def _follow_copies(function: Any, module: nn.Module) -> Callable[..., Any]:
    """Return `function`, whose closure may hold a bound method of `module` (TRL's head does).

    On a copy of `module`, that method is bound to the copy.
    """
    cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
    held = [cell.cell_contents for cell in cells]
    if not any(isinstance(x, MethodType) and x.__self__ is module for x in held):
        return function

    def follow(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            return function(self, *args, **kwargs)
        of_copy = tuple(
            CellType(MethodType(unbind_forward(x, module), self))
            if isinstance(x, MethodType) and x.__self__ is module
            else cell
            for x, cell in zip(held, cells, strict=True)
        )
        made = FunctionType(
            function.__code__, function.__globals__, closure=of_copy, argdefs=function.__defaults__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made(self, *args, **kwargs)

    return follow
