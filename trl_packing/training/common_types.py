"""One type for each column of several data sets, so that they can be joined.

int64, float64          float64     weights, or numbers that order documents
ClassLabel, string      string      the names of the classes
int64, string           refused     with the names of the data sets
"""

from collections.abc import Mapping
from typing import Any

from datasets import ClassLabel, Dataset, Features, LargeList, List, Value

_NAMES = "trl_packing_names"  # a column for a moment, in the place of classes


def with_common_types(parts: Mapping[str, Dataset]) -> list[Dataset]:
    """Return data sets with the same columns, each column of the same type in all of them.

    Args:
        parts: by the names of their sources; all have the same columns.

    Raises:
        ValueError: the types of a column have no type in common.
    """
    first = next(iter(parts.values()))
    common = Features(
        {
            column: _common_type(column, {name: d.features[column] for name, d in parts.items()})
            for column in first.features
        }
    )
    return [part if part.features == common else _cast(part, common) for part in parts.values()]


def _common_type(column: str, types: Mapping[str, Any]) -> Any:
    known = {name: each for name, each in types.items() if _value_type(each) != "null"}
    if not known:
        return next(iter(types.values()))
    name, first = next(iter(known.items()))
    for other, each in known.items():
        if each == first or {_kind(first), _kind(each)} == {"classes", "texts"}:
            continue
        if _kind(first) != _kind(each) or isinstance(first, Value) != isinstance(each, Value):
            raise ValueError(
                f"the column {column!r} holds {in_words(first)} in train_dataset[{name!r}] and "
                f"{in_words(each)} in train_dataset[{other!r}]; give it one type in all of them"
            )
    if all(each == first for each in known.values()):
        return first
    if _kind(first) in ("classes", "texts"):
        return Value("string")
    if any(_value_type(each).startswith("float") for each in known.values()):
        return Value("float64") if isinstance(first, Value) else List(Value("float64"))
    return Value("int64") if isinstance(first, Value) else first  # ids of tokens fit in any


def _value_type(each: Any) -> str:
    """Return the type of a value, or of the entries of a list: "int64"; "" for other types."""
    if isinstance(each, (List, LargeList)):
        each = each.feature
    return each.dtype if isinstance(each, Value) else ""


def _kind(each: Any) -> str:
    """Return a word for types that have a type in common."""
    if isinstance(each, ClassLabel):
        return "classes"
    value = _value_type(each)
    if value.startswith(("int", "uint", "float", "bool")):
        return "numbers"
    return "texts" if value in ("string", "large_string") else value or str(each)


def in_words(each: Any) -> str:
    """Return the type of a column for messages: "int64", "lists of float64", "classes"."""
    if isinstance(each, (List, LargeList)):
        return f"lists of {in_words(each.feature)}"
    return "classes" if isinstance(each, ClassLabel) else str(getattr(each, "dtype", each))


def _cast(part: Dataset, common: Features) -> Dataset:
    for column, feature in part.features.items():
        if isinstance(feature, ClassLabel) and feature != common[column]:
            names = [  # null and −1 stand for no class
                None if number is None or number < 0 else feature.names[number]
                for number in part[column][:]
            ]
            part = part.add_column(_NAMES, names, feature=Value("string"))
            part = part.remove_columns(column).rename_column(_NAMES, column)
    return part.select_columns([*common]).cast(common)
