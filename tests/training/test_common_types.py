"""Columns of several data sets get one type, in which no value changes."""

import pytest
from datasets import ClassLabel, Dataset, List, Value

from trl_packing.training.common_types import with_common_types


def joined(**values) -> tuple[object, list]:
    """Return the common type of a column, and the values of all data sets in it."""
    sets = {
        name: given if isinstance(given, Dataset) else Dataset.from_dict({"n": given})
        for name, given in values.items()
    }
    parts = with_common_types(sets)
    (kind,) = {str(part.features["n"]) for part in parts}
    assert kind == str(parts[0].features["n"])
    return parts[0].features["n"], [value for part in parts for value in part["n"][:]]


def classes(names: list[str], ids: list[int | None]) -> Dataset:
    return Dataset.from_dict({"n": ids}).cast_column("n", ClassLabel(names=names))


@pytest.mark.parametrize(
    ("values", "kind", "found"),
    [
        ({"a": [1, 2], "b": [3]}, Value("int64"), [1, 2, 3]),
        ({"a": [1, 2], "b": [0.5]}, Value("float64"), [1.0, 2.0, 0.5]),
        ({"a": [0.5], "b": [True, False]}, Value("float64"), [0.5, 1.0, 0.0]),
        ({"a": [None], "b": [0.5], "c": [1]}, Value("float64"), [None, 0.5, 1.0]),
        ({"a": [[1, 0]], "b": [[0.5]]}, List(Value("float64")), [[1.0, 0.0], [0.5]]),
        ({"a": ["x"], "b": [None]}, Value("string"), ["x", None]),
    ],
)
def test_numbers_of_two_types_stay_what_they_are(values, kind, found):
    assert joined(**values) == (kind, found)


def test_small_integers_do_not_overflow():
    small = Dataset.from_dict({"n": [1]}).cast_column("n", Value("int32"))
    assert joined(a=small, b=[2**40]) == (Value("int64"), [1, 2**40])


def test_classes_are_joined_by_their_names():
    first, second = classes(["x", "y"], [0, 1, None]), classes(["y", "x"], [0, 1])
    assert joined(a=first, b=second) == (Value("string"), ["x", "y", None, "y", "x"])
    assert joined(a=["web"], b=second) == (Value("string"), ["web", "y", "x"])
    assert joined(a=first, b=first)[0] == ClassLabel(names=["x", "y"])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"a": [1], "b": ["1"]}, r"holds int64 in train_dataset\['a'\] and string in train_data"),
        ({"a": [1], "b": [[1]]}, r"int64 in train_dataset\['a'\] and lists of int64 in train_da"),
        ({"a": [None], "b": [1.5], "c": ["x"]}, r"float64 in train_dataset\['b'\] and string"),
        ({"a": classes(["x"], [0]), "b": [1]}, r"classes in train_dataset\['a'\] and int64"),
    ],
)
def test_types_with_nothing_in_common_are_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        joined(**values)
