"""Does a document end in a trained stop token? If not, a model never learns to stop there.

    tokens     Why  ?  Because  .  <|im_end|>  \n        the end of a turn, then white space
    labels      .   .  Because  .  <|im_end|>  \n        ends in a trained stop token
    labels      .   .  Because  .      .       .         the stop token is there: train it
    tokens     Why  ?  Because  .                        trained to the end: append one
    labels      .   .  Because  .      .       .  Hm ?   ends untrained: nothing to append to

White space after the stop token is passed over: ChatML ends "<|im_end|>\\n", and TRL trains both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from trl_packing.documents.arrow import TOKEN_COLUMNS, ArrowDocuments, list_column, token_lists
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS
from trl_packing.formatting.printable import quote

# A text that no chat template contains.
_ANSWER = "Xyzzy-3141"


def stop_token_ids(
    tokenizer: Any, generation_config: Any = None, chat_template: str | None = None
) -> frozenset[int]:
    """Return the ids at which generation stops, or an assistant's turn ends.

    They are the tokenizer's EOS token, those of `generation_config`, and the special token that
    follows an answer in `chat_template` (default: the tokenizer's own).
    """
    ids = [tokenizer.eos_token_id, _end_of_turn(tokenizer, chat_template)]
    configured = getattr(generation_config, "eos_token_id", None)
    ids += configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(token) for token in ids if token is not None)


def _end_of_turn(tokenizer: Any, chat_template: str | None) -> int | None:
    """Return the first special token after an answer; None without one, or without a template."""
    turns = [("user", "Why?"), ("assistant", _ANSWER)]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    except Exception:  # a template raises what its author likes
        return None
    rest = text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = tokenizer.added_tokens_decoder.items()
    special |= {token_id: token.content for token_id, token in added if token.special}
    found = [(rest.index(word), -len(word), id_) for id_, word in special.items() if word in rest]
    return min(found)[2] if found else None


# --- the check ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MissingEos:
    """`documents` of `of` documents do not end in a trained stop token; `row` is the first."""

    documents: int
    of: int
    row: int
    ending: str
    stop_tokens: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(map(quote, self.stop_tokens))
        return (
            f"{self.documents:,} of {self.of:,} documents ({self.documents / self.of:.1%}) do not "
            f"end in a trained stop token ({'one of ' * (len(self.stop_tokens) > 1)}{names})"
        )

    def note(self, append_eos: bool) -> str:
        """Return the sentence with the way out: short, for the report."""
        remedy = (
            "their last tokens are not trained: check the completion or assistant masks"
            if append_eos
            else "set append_eos=True, or end them in one"
        )
        return f"{self}; {remedy}"

    def warning(self, append_eos: bool) -> str:
        """Return the same with what it means, and the end of the first such document."""
        return (
            f"{self.note(append_eos)}: the model may not learn to stop there (the first is row "
            f"{self.row}, ending {quote(self.ending)})"
        )


def documents_without_eos(
    dataset: datasets.Dataset, tokenizer: Any, stop_ids: Iterable[int]
) -> MissingEos | None:
    """Return which documents of `dataset` do not end in a trained stop token; None if all do.

    Documents without a trained token are left out, and nothing is asked where there is no stop
    token.
    """
    stops = sorted(stop_ids)
    if not stops:
        return None
    documents = ArrowDocuments(dataset, TOKEN_COLUMNS)
    whitespace = _WhitespaceTokens(tokenizer, stops)
    trained, ended = [np.zeros(0, bool)], [np.zeros(0, bool)]
    for labels, offsets in documents.readers["labels"].chunks:
        trained.append(_last(labels, offsets, [IGNORE_INDEX]) >= 0)
        ended.append(_holds(labels, whitespace.last(labels, offsets, IGNORE_INDEX), stops))
    rows = documents.stored_rows(np.arange(len(documents)))
    trained_rows = np.concatenate(trained)[rows]
    wrong = np.flatnonzero(trained_rows & ~np.concatenate(ended)[rows])
    if not len(wrong):
        return None
    row = int(wrong[0])
    return MissingEos(
        documents=len(wrong),
        of=int(trained_rows.sum()),
        row=row,
        ending=tokenizer.decode(documents[row]["input_ids"][-20:].tolist())[-40:],
        stop_tokens=tuple(tokenizer.convert_ids_to_tokens(stop) or str(stop) for stop in stops),
    )


class _WhitespaceTokens:
    """The white-space tokens met at the ends of documents; only ids that are met are decoded."""

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int]):
        self.tokenizer = tokenizer
        self.is_whitespace = dict.fromkeys(stop_ids, False)

    @property
    def ids(self) -> list[int]:
        return sorted(token for token, is_space in self.is_whitespace.items() if is_space)

    def last(self, values: np.ndarray, offsets: np.ndarray, *ignored: int) -> np.ndarray:
        """Return where the last value of each list is that is neither `ignored` nor white space."""
        while True:
            last = _last(values, offsets, [*ignored, *self.ids])
            met = set(np.unique(values[last[last >= 0]]).tolist()) - self.is_whitespace.keys()
            decoded = {token: not self.tokenizer.decode([token]).strip() for token in met}
            self.is_whitespace |= decoded
            if not any(decoded.values()):
                return last


def _last(values: np.ndarray, offsets: np.ndarray, ignored: Iterable[int]) -> np.ndarray:
    """Return where the last value of each list is that is not in `ignored`; -1 where none is."""
    wanted = np.concatenate([[-1], np.flatnonzero(~np.isin(values, list(ignored)))])
    last = wanted[np.searchsorted(wanted, offsets[1:]) - 1]
    return np.where(last >= offsets[:-1], last, -1)


def _holds(values: np.ndarray, places: np.ndarray, wanted: Iterable[int]) -> np.ndarray:
    """Return whether there is a place, and one of `wanted` at it."""
    found = places >= 0
    found[found] = np.isin(values[places[found]], list(wanted))
    return found


# --- appending ------------------------------------------------------------------------------------


def append_eos(
    dataset: datasets.Dataset,
    tokenizer: Any,
    stop_ids: Iterable[int],
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> datasets.Dataset:
    """Return `dataset` with the tokenizer's EOS token after documents that are trained to the end.

    Where an untrained stop token follows the last trained one, that is trained instead. Documents
    that end in a trained stop token, in other untrained tokens, or without any, stay as they are.
    Raises ValueError if the tokenizer has no EOS token.
    """
    stops = sorted(stop_ids)
    eos_id = _eos_id(tokenizer)
    if documents_without_eos(dataset, tokenizer, stops) is None:
        return dataset
    whitespace = _WhitespaceTokens(tokenizer, stops)
    readers = ArrowDocuments(dataset, TOKEN_COLUMNS).readers
    for column, ignored in (("input_ids", ()), ("labels", (IGNORE_INDEX,))):
        for chunk in readers[column].chunks:
            whitespace.last(*chunk, *ignored)
    # Ids and not the tokenizer: its hash, by which `map` caches, changes when it is used.
    arguments = {"eos_id": eos_id, "stop_ids": stops, "whitespace_ids": whitespace.ids}
    return (
        dataset.with_format("arrow")
        .map(
            append_eos_to_table,
            fn_kwargs=arguments,
            batched=True,
            num_proc=num_proc,
            desc=f"Appending EOS to {name} dataset",
        )
        .with_format(None)
    )


def eos_appender(tokenizer: Any, stop_ids: Iterable[int]) -> Callable[[pa.Table], pa.Table]:
    """Return what `append_eos` does, for the batches of a stream."""
    return partial(_append_eos_to_batch, tokenizer, sorted(stop_ids), _eos_id(tokenizer))


def _append_eos_to_batch(
    tokenizer: Any, stop_ids: list[int], eos_id: int, table: pa.Table
) -> pa.Table:
    lists = token_lists(table)
    whitespace = _WhitespaceTokens(tokenizer, stop_ids)
    whitespace.last(*lists["input_ids"])
    whitespace.last(*lists["labels"], IGNORE_INDEX)
    return append_eos_to_table(table, eos_id, stop_ids, whitespace.ids)


def _eos_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "append_eos=True, but the tokenizer has no eos_token; set eos_token='...' in the "
            "config, or tokenizer.eos_token"
        )
    return tokenizer.eos_token_id


def append_eos_to_table(
    table: pa.Table, eos_id: int, stop_ids: list[int], whitespace_ids: list[int]
) -> pa.Table:
    """Return `table` with every document that is trained to its end ending in a stop token."""
    lists = token_lists(table)
    ids, offsets = lists["input_ids"]
    labels = lists["labels"][0].copy()
    starts, stops = offsets[:-1], offsets[1:]
    ended = _holds(labels, _last(labels, offsets, [IGNORE_INDEX, *whitespace_ids]), stop_ids)
    end = _last(ids, offsets, whitespace_ids)
    stands = _holds(ids, end, stop_ids)
    follows = stands & (end > starts)
    follows[follows] = labels[end[follows] - 1] != IGNORE_INDEX
    trained_now = end[follows & ~ended]
    labels[trained_now] = ids[trained_now]
    appends = ~ended & ~stands & (stops > starts)
    appends[appends] = labels[stops[appends] - 1] != IGNORE_INDEX
    at = stops[appends]
    longer = offsets + np.concatenate([[0], np.cumsum(appends)])
    values = {"input_ids": np.insert(ids, at, eos_id), "labels": np.insert(labels, at, eos_id)}
    if TOKEN_WEIGHTS in lists:
        weights = lists[TOKEN_WEIGHTS][0].copy()
        weights[trained_now] = 1
        values[TOKEN_WEIGHTS] = np.insert(weights, at, 1)
    columns = [
        list_column(values[field.name], longer, field)
        if field.name in values
        else table.column(field.name)
        for field in table.schema
    ]
    return pa.table(columns, names=table.column_names)
