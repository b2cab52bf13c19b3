"""Rows through any loader give the same documents, labels and weights, or one sentence."""

import json

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from harness import make_trainer
from helpers.prepared import write_rows
from helpers.tiny import tiny_tokenizer


def said(*flags):
    """Return a conversation whose messages carry these flags, user and assistant in turn."""
    roles = ("user", "assistant")
    return [
        {"role": roles[n % 2], "content": f"This is part {n}.", **flag}
        for n, flag in enumerate(flags)
    ]


PLAIN = [{"messages": said({}, {}, {}, {})}, {"messages": said({}, {})}]
ROWS = {
    "plain": PLAIN,
    "first": [{"messages": said({}, {"weight": 0}, {}, {"weight": 2})}, *PLAIN],
    "later": [*PLAIN, {"messages": said({}, {"weight": 0}, {}, {})}],
    "half": [*PLAIN, {"messages": said({}, {"weight": 0.5}, {}, {})}, *PLAIN],
    "trained users": [*PLAIN, {"messages": said({"train": True}, {"train": False}, {}, {})}],
    "nulls": [{"messages": said({"train": None}, {"weight": None})}, *PLAIN],
    "quoted": [*PLAIN, {"messages": said({}, {"content": 'The key "weight" of {"train": 1}.'})}],
    "completions": [
        {"prompt": each["messages"][:1], "completion": each["messages"][1:]}
        for each in (*PLAIN, {"messages": said({}, {}, {"train": True}, {"weight": 2})})
    ],
}


def loaded(kind, file, folder, **options):
    options |= {"data_files": file, "split": "train", "cache_dir": str(folder)}
    return load_dataset(kind, **options)


def from_csv(rows, folder):
    texts = [{name: json.dumps(row[name]) for name in row} for row in rows]
    Dataset.from_list(texts).to_csv(folder / "rows.csv")
    return loaded("csv", str(folder / "rows.csv"), folder)


def from_parquet(rows, folder):
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return loaded("parquet", str(folder / "rows.parquet"), folder)


def from_disk(rows, folder):
    from_jsonl(rows, folder).save_to_disk(folder / "saved")
    return datasets.load_from_disk(folder / "saved")


def from_jsonl(rows, folder, **options):
    return loaded("json", write_rows(folder / "rows.jsonl", rows), folder, **options)


def sliced(rows, folder):
    """Rows among others that carry all flags, of a table in chunks."""
    others = [{name: said({"train": True}, {"weight": 3}) for name in rows[0]}]
    table = from_jsonl([*others, *rows, *others], folder)
    chunked = concatenate_datasets([table, table]).select([*range(len(rows) + 2), 0])
    return chunked.select(range(1, len(rows) + 1))


def chunked(rows, folder):
    tables = [Dataset.from_list(rows).data.slice(n, 1).table for n in range(len(rows))]
    return Dataset(pa.concat_tables(tables))


LOADERS = {
    "jsonl": from_jsonl,
    "parquet": from_parquet,
    "csv": from_csv,
    "saved": from_disk,
    "sliced": sliced,
    "chunked": chunked,
    "generator": lambda rows, folder: Dataset.from_generator(lambda: iter(rows)),
    "stream": lambda rows, folder: from_jsonl(rows, folder, streaming=True),
    "stream of a table": lambda rows, folder: Dataset.from_list(rows).to_iterable_dataset(),
    "stream of a generator": lambda rows, _: IterableDataset.from_generator(lambda: iter(rows)),
}


def documents(rows, folder, **changes):
    """Return the ids, labels and weights of the documents that a run trains."""
    options = {"tokenizer": tiny_tokenizer(chat=True), "max_steps": 1, "max_length": 512, **changes}
    found = []
    for row in make_trainer(folder, rows, **options).train_dataset:
        weights = row.get("loss_weights") or [float(label != -100) for label in row["labels"]]
        found.append((list(row["input_ids"]), list(row["labels"]), list(weights)))
    return found


def documents_or_sentence(*args, **changes):
    try:
        return documents(*args, **changes)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("train_on", [None, "assistant", "every_turn"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_every_loader_gives_the_same_documents_or_one_sentence(tmp_path, rows, train_on):
    if train_on == "every_turn" and '"train": true' in json.dumps(rows):
        pytest.skip("it trains no user")
    wanted = documents(rows, tmp_path, train_on=train_on)
    for name, load in LOADERS.items():
        folder = tmp_path / name
        folder.mkdir()
        found = documents_or_sentence(load(rows, folder), tmp_path, train_on=train_on)
        if not isinstance(found, str):
            assert found == wanted, name
        elif name == "csv":
            assert "JSON" in found
        else:
            assert name.startswith("stream"), f"{name}: {found}"
            assert rows != PLAIN
            assert "first row" in found


def test_flags_in_a_later_row_are_read_and_decide(tmp_path):
    """Control: they change what is trained."""
    flagged, half, plain = (documents(ROWS[n], tmp_path) for n in ("later", "half", "plain"))
    assert plain[0][1] == plain[0][0]
    assert flagged[0][1].count(-100) > len(flagged[0][0]) / 3
    assert {*half[2][2]} == {0, 0.5, 1}
