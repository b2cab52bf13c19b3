"""Turns files of queries and responses into packed rows for a plain trainer, in one call.

{"query": "2 + 3?", "response": "5"}     read, formatted, tokenized, cut at pack_len, counted
    ▼
PackedDataset                            the response is trained, including its EOS
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.prepared import load_rows
from trl_packing.data.stop_tokens import stop_token_ids
from trl_packing.formatting.chat_template import ChatTemplate
from trl_packing.formatting.prompt_template import PromptTemplate
from trl_packing.formatting.row_format import RowFormat
from trl_packing.formatting.tokenize_rows import documents_from_rows
from trl_packing.plain_trainer.dataset import PackedDataset

logger = logging.getLogger(__name__)

_NO_LIMIT = 10**9  # tokenizers without a limit report 10**30


def make_supervised_dset(
    tokenizer: Any,
    data_path: str | Sequence[str],
    query_field: str | Sequence[str] = "query",
    resp_field: str | Sequence[str] = "response",
    tokenized_cache_home: str | None = None,
    shuffle_seed: int | None = 42,
    pack_len: int | None = None,
    prompt_template: Any = "alpaca",
    *,
    overflow: str = "truncate",
    rows_multiple_of: int = 1,
) -> "PackedDataset | Dataset":
    """Return queries and responses as packed rows. Responses are trained, including their EOS.

    Args:
        tokenizer: of the model.
        data_path: a .json, .jsonl or .parquet file, a folder of such files, or a hub id; or several
            of these.
        query_field: the column of queries, one name for all paths or one for each.
        resp_field: the column of responses, one name for all paths or one for each.
        tokenized_cache_home: the cache folder of `datasets`. If None or "", its default.
        shuffle_seed: as in `PackedDataset`.
        pack_len: most tokens of a row. If None or not positive, the documents are returned
            unpacked, as a `datasets.Dataset` with `input_ids`, `labels` and `attention_mask`.
        prompt_template: "alpaca", "qa", a file, a text with columns in braces, a `PromptTemplate`,
            or a mapping (or .json file) of DART-Math's parts: sys_prompt, query_prompt,
            prompt_after_query, resp_prompt, prompt_before_resp.
        overflow: the policy for documents longer than `pack_len` or the tokenizer's
            `model_max_length`: "truncate", "truncate_prompt", "drop", "split" or "error". Losses
            are logged.
        rows_multiple_of: as in `PackedDataset`.

    Raises:
        ValueError: the data cannot be read.
    """
    paths = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path)
    queries, responses = _for_each(paths, query_field), _for_each(paths, resp_field)
    packs = pack_len is not None and pack_len > 0
    limits = [n for n in (pack_len if packs else None, tokenizer.model_max_length) if n]
    capacity = min(limits, default=_NO_LIMIT)
    parts = []
    for path, query, response in zip(paths, queries, responses, strict=True):
        row_format = RowFormat(
            ChatTemplate(tokenizer),
            tokenizer.eos_token,
            prompt_template=_prompt_template(prompt_template, query),
            response_field=response,
        )
        rows = load_rows(os.fspath(path), cache_dir=tokenized_cache_home or None)
        whole = documents_from_rows(rows, row_format, name=Path(path).name)
        fitted, counts = fit_and_count(
            whole,
            Overflow(overflow, capacity if capacity < _NO_LIMIT else None),
            stop_ids=stop_token_ids(tokenizer, None, None),
            name=Path(path).name,
        )
        if str(counts):
            logger.warning(f"{path}: {counts}")
        parts.append(fitted)
    documents = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if packs and pack_len is not None:
        return PackedDataset(
            documents, tokenizer, pack_len, shuffle_seed, rows_multiple_of=rows_multiple_of
        )
    return documents.map(_with_mask, batched=True, desc="Adding attention_mask")


def _for_each(paths: Sequence[Any], given: str | Sequence[str]) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    names = names * len(paths) if len(names) == 1 else names
    if len(names) != len(paths):
        raise ValueError(
            f"{len(names)} fields {names} were given for {len(paths)} data paths; give one field, "
            "or one for each path"
        )
    return names


def _with_mask(batch: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return {"attention_mask": [[1] * len(ids) for ids in batch["input_ids"]]}


_PARTS = ("query_prompt", "prompt_after_query", "resp_prompt", "prompt_before_resp")


def _prompt_template(given: Any, query_field: str) -> PromptTemplate:
    if isinstance(given, PromptTemplate):
        return PromptTemplate(given.template, given.with_input, query_field)
    if isinstance(given, str):
        if not (given.endswith(".json") and os.path.isfile(given)):
            return PromptTemplate.from_setting(given, query_field)
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    parts = given if isinstance(given, Mapping) else vars(given)
    if "query_prompt" not in parts:
        raise ValueError(
            f"prompt_template has {sorted(parts)}; a mapping must have query_prompt, and may have "
            "sys_prompt, prompt_after_query, resp_prompt and prompt_before_resp"
        )
    before, *after = (_escaped(parts.get(name, "")) for name in _PARTS)
    # As in DART-Math, no space or line break separates the prompt from the response.
    prompt = f"{before}{{query}}{''.join(after)}".rstrip()
    return PromptTemplate(_escaped(parts.get("sys_prompt", "")) + prompt, None, query_field)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
