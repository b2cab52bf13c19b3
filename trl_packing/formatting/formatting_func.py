"""A user's `formatting_func`, called as TRL calls it now: one example in, one text out."""

from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset


def format_per_example(
    formatting_func: Callable[[Any], Any] | None, dataset: Dataset | IterableDataset
) -> Callable[[Any], Any] | None:
    """Return a function from one example to one text, or None without a `formatting_func`.

    Earlier versions of TRL passed a batch: lists in, a list of texts out. The first example shows
    which kind the function is.
    """
    if formatting_func is None or isinstance(_tried(formatting_func, next(iter(dataset))), str):
        return formatting_func
    texts = _tried(formatting_func, _batch_of_one(next(iter(dataset))))
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return partial(_format_one, formatting_func)
    return formatting_func  # its error is raised when rows are rendered


def _tried(formatting_func: Callable[[Any], Any], example: Any) -> Any:
    """Return the result for `example`, or None if the function fails: it may take batches."""
    try:
        return formatting_func(example)
    except Exception:
        return None


def _batch_of_one(example: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in example.items()}


def _format_one(formatting_func: Callable[[Any], Any], example: dict[str, Any]) -> str:
    texts = formatting_func(_batch_of_one(example))
    if len(texts) != 1:
        raise ValueError(
            f"formatting_func made {len(texts)} texts of one example; it must make one of each "
            "(map the data set before, to make more or fewer)"
        )
    return texts[0]
