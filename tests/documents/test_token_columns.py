"""Token columns as flat arrays, whatever lists hold them, and back in the type that they had."""

import pyarrow as pa
import pytest

from trl_packing.documents.arrow import list_column, token_lists

IDS = [[5, 6], [], [7, 8, 9]]
KINDS = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())]


def table_of(ids, kind=None) -> pa.Table:
    column = pa.array(ids, kind)
    return pa.table({"input_ids": column, "labels": column, "source": ["a"] * len(ids)})


@pytest.mark.parametrize("kind", KINDS)
def test_flat_and_back_also_of_a_slice_over_chunks(kind):
    table = table_of(IDS, kind)
    lists = token_lists(table)
    assert list(lists) == ["input_ids", "labels"]
    values, offsets = lists["input_ids"]
    assert (values.tolist(), offsets.tolist()) == ([5, 6, 7, 8, 9], [0, 2, 2, 5])
    column = table.column("input_ids").combine_chunks()
    assert list_column(values, offsets, table.schema.field("input_ids")).equals(column)
    values, offsets = token_lists(pa.concat_tables([table, table]).slice(2, 3))["labels"]
    assert (values.tolist(), offsets.tolist()) == ([7, 8, 9, 5, 6], [0, 3, 5, 5])


def test_unequal_numbers_of_entries_are_named():
    table = table_of(IDS).set_column(1, "labels", [[[1], [], [1, 2, 3]]])
    with pytest.raises(ValueError, match="a document has 2 input_ids but 1 labels; give one label"):
        token_lists(table)
