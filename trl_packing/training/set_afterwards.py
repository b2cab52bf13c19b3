"""What a user has set on a trainer since it was built, and what it means.

    trainer.data_collator =     a PackedCollator           rows as it makes them
                                what calls ours            our rows, and what it makes of them
                                any other                  TRL's path, unchanged, on padded rows
    trainer.train_dataset =     rows of any form           documents, and another report
                                not of `datasets`          TRL's path

A collator of a user's own is given lists of Python numbers, as in TRL: `ids + [2]` means something
else on an array.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

# Objects of these packages are not looked into: they hold models, tokenizers and data.
_NOT_A_USERS = {"accelerate", "builtins", "datasets", "numpy", "tokenizers", "torch"}
_NOT_A_USERS |= {"transformers", "trl", "trl_packing"}


def calls(collator: Any, ours: Any, depth: int = 4) -> bool:
    """Return whether `collator` holds `ours`, to call it: as an attribute, an argument, a variable.

    Args:
        collator: anything that makes batches.
        ours: the collator that it may have been made from.
        depth: how many objects lie between the two at most.
    """
    if collator is ours:
        return True
    return depth > 0 and any(calls(held, ours, depth - 1) for held in _held_by(collator))


def _held_by(thing: Any) -> Iterator[Any]:
    """Yield what `thing` may call: variables of functions, attributes, arguments, elements."""
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
    elif type(thing).__module__.partition(".")[0] not in _NOT_A_USERS:
        # A trainer has ours under names of its own, whatever its methods call.
        own = ("data_collator", "_packed_collator")
        yield from (
            held for name, held in getattr(thing, "__dict__", {}).items() if name not in own
        )


@dataclass
class GivenLists:
    """A user's collator, given lists of Python numbers instead of arrays."""

    collator: Callable[[list[dict[str, Any]]], Any]

    def __call__(self, documents: Sequence[dict[str, Any]]) -> Any:
        return self.collator([{k: _as_python(v) for k, v in d.items()} for d in documents])


def _as_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
