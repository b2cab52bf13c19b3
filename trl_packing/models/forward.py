"""models.forward"""

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def unbind_forward(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return `forward` of `module` as a function of the module too.

    Bound, it would run the weights of this very module in a copy of it.
    """
    function = getattr(forward, "__func__", None)
    if function is not None and getattr(forward, "__self__", None) is module:
        return _following(function, module)
    if isinstance(forward, functools.partial) and forward.args[:1] == (module,):  # accelerate's
        first, given = forward.args[1:], forward.keywords
        return lambda self, *args, **kwargs: forward.func(self, *first, *args, **given, **kwargs)
    return lambda _self, *args, **kwargs: forward(*args, **kwargs)


def _following(function: Any, module: nn.Module) -> Callable[..., Any]:
    """Return `function` of a module whose closure holds a bound method of `module` (TRL's head).

    Called on a copy of `module`, it finds that method bound to the copy.
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
