#!/usr/bin/env bash
# datasets: load_dataset("json") takes the keys of messages from the first 10 MB of a file.
#
# A key that only later messages have (a name, tool calls) stops the load: "Couldn't cast array of type
# struct<role, content, name>". The same row at the beginning of the file loads. So a file that loads with its
# first million rows may fail with all of them. chunksize=..., in bytes, sets another size of a block.
#
# Seen on 2026-11-27 with datasets 5.2.0, pandas 3.1.1 and pyarrow 26.0.1:
#
#     the key in the first row    loads, as List(Json)
#     the key behind 10 MB        DatasetGenerationError: TypeError: Couldn't cast array of type
#                                 struct<role: string, content: string, name: string>
#     ... with a larger chunksize loads, as List(Json)
#
# It exits with 0 if this is seen, and with 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1
cd "$folder"
cat > case.py <<'PYTHON'
import json
import sys

import datasets
import pandas
import pyarrow

print(*(f"{one.__name__} {one.__version__}" for one in (datasets, pandas, pyarrow)))
datasets.disable_progress_bars()
PLAIN = {"messages": [{"role": "user", "content": "x" * 2_000}]}
NAMED = {"messages": [{"role": "user", "content": "Hi", "name": "Bob"}]}


def outcome(name, rows, **options):
    """Return how a file of `rows` loads."""
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    try:
        found = datasets.load_dataset(
            "json", data_files=name, split="train", cache_dir="cache", **options
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        words = " ".join(str(cause).split())
        return f"DatasetGenerationError: {type(cause).__name__}: {words}"
    assert len(found) == len(rows)
    return f"loads, as {found.features}"


first = outcome("first.jsonl", [NAMED] + [PLAIN] * 6_000)
last = outcome("last.jsonl", [PLAIN] * 6_000 + [NAMED])
larger = outcome("last.jsonl", [PLAIN] * 6_000 + [NAMED], chunksize=100 << 20)
print("the key in the first row:", first)
print("the key behind 10 MB:", last)
print("... with a larger chunksize:", larger)
is_seen = first.startswith("loads") and "Couldn't cast" in last and larger.startswith("loads")
print("seen" if is_seen else "NOT SEEN: the behavior has changed")
sys.exit(not is_seen)
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" case.py
