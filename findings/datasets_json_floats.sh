#!/usr/bin/env bash
# datasets: load_dataset("json") changes floats if objects in a list have different keys.
#
# Messages of a chat have different keys as soon as one of them has tool calls. Their column then has
# the feature List(Json()), and datasets writes every line of the file again with pandas' ujson, at ten
# decimals, before it parses the file. Floats of plain columns change, too. Values of the Json column are
# decoded by the same ujson, which misses the nearest float. Nothing is printed.
#
# Seen on 2026-11-27 with datasets 5.2.0, pandas 3.1.1 and pyarrow 26.0.1:
#
#     written                   5.81                 1e-13   1.7976931348623157e+308
#     equal keys, column        5.81                 1e-13   1.7976931348623157e+308
#     equal keys, message       5.81                 1e-13   1.7976931348623157e+308
#     different keys, column    5.81                 0.0     inf
#     different keys, message   5.8100000000000005   0.0     inf
#     text in a message         5.81                 1e-13   1.7976931348623157e+308
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
WRITTEN = [5.81, 1e-13, sys.float_info.max]


def load(name, more):
    """Return rows with a float in a column, in a message, and as text in a message."""
    with open(name, "w") as file:
        for number in WRITTEN:
            message = {"role": "user", "number": number, "text": json.dumps(number)}
            row = {"number": number, "messages": [message, message | more]}
            file.write(json.dumps(row) + "\n")
    rows = datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")
    print(name, rows.features)
    return {
        "column": rows["number"][:],
        "message": [row["messages"][0]["number"] for row in rows],
        "text": [json.loads(row["messages"][0]["text"]) for row in rows],
    }


equal, different = load("equal.jsonl", {}), load("different.jsonl", {"tool_calls": []})
print("written               ", WRITTEN)
for title, found in (("equal keys", equal), ("different keys", different)):
    for place, numbers in found.items():
        print(f"{title}, {place}".ljust(22), numbers)
is_seen = (
    equal == {place: WRITTEN for place in equal}
    and different["column"] == [5.81, 0.0, float("inf")]
    and different["message"] == [5.8100000000000005, 0.0, float("inf")]
    and different["text"] == WRITTEN
)
print("seen" if is_seen else "NOT SEEN: the behavior has changed")
sys.exit(not is_seen)
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" case.py
