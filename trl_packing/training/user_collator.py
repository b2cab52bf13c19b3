"""Collators that a user sets on a built trainer: whether they call ours, and what they are given.

    data_collator = a PackedCollator          its rows
                    around ours               rows of ours, changed by the user's collator
                    any other                 TRL's path, unchanged, on padded rows

A user's collator gets lists of Python numbers, as in TRL: `ids + [2]` means something else on an
array.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

# Objects of these packages are not searched: they hold models, tokenizers and data.
_LIBRARIES = {"accelerate", "builtins", "datasets", "numpy", "tokenizers", "torch"}
_LIBRARIES |= {"transformers", "trl", "trl_packing"}


def calls(collator: Any, ours: Any, depth: int = 4) -> bool:
    """Return whether `collator` holds `ours` as an attribute, an argument or a variable.

    Args:
        collator: anything that makes batches.
        ours: the collator that it may call.
        depth: most objects between the two.
    """
    if collator is ours:
        return True
    return depth > 0 and any(calls(held, ours, depth - 1) for held in _held_by(collator))


def _held_by(thing: Any) -> Iterator[Any]:
    """Yield the objects that `thing` may call: variables, attributes, arguments, elements."""
    if isinstance(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        names = thing.__code__.co_names
        yield from (thing.__globals__[name] for name in names if name in thing.__globals__)
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
    elif isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, (list, tuple, dict)) and len(thing) < 100:  # more of them are data
        yield from thing.values() if isinstance(thing, dict) else thing
    elif type(thing).__module__.partition(".")[0] not in _LIBRARIES:
        # A trainer holds our collator as `data_collator`, whether its methods call it or not.
        held = getattr(thing, "__dict__", {})
        yield from (value for name, value in held.items() if name != "data_collator")


@dataclass
class PythonLists:
    """Calls a user's collator with lists of Python numbers instead of arrays."""

    collator: Callable[[list[dict[str, Any]]], Any]

    def __call__(self, documents: Sequence[dict[str, Any]]) -> Any:
        return self.collator([{k: _as_python(v) for k, v in d.items()} for d in documents])


def _as_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
