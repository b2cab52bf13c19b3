"""Documents should end in a trained stop token; otherwise a model never learns to stop there.

tokens     Why  ?  Because  .  <|im_end|>  \\n        ChatML ends so; TRL trains both
labels      .   .  Because  .      .       .         untrained stop token: train it
tokens     Why  ?  Because  .                        trained to the end: append EOS
labels      .   .  Because  .      .       .  Hm ?   ends untrained: nothing is appended

So should the answers before the last: gpt-oss ends those in `<|end|>`, where generation goes on.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.printable import quote
from trl_packing.documents.arrow import ArrowDocuments, flat_lists, list_column
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS, token_columns


@dataclass(frozen=True)
class EosRule:
    """The tokens that end a document, and whether EOS is appended where they are missing."""

    tokenizer: Any
    stop_ids: frozenset[int]
    appends: bool = False
    generation_ids: frozenset[int] = frozenset()  # at which generation stops; empty if unknown

    @cached_property
    def spaces(self) -> list[int]:
        """Tokens of the white space that templates and texts have behind a stop token."""
        texts = ["\n", "\n\n", "\n\n\n", "\r\n", " ", "  ", " \n", "\t"]
        tokens = {*chain(*self.tokenizer(texts, add_special_tokens=False)["input_ids"])}
        others = sorted(tokens - self.stop_ids)
        return [token for token in others if not self.tokenizer.decode([token]).strip()]

    def names(self, ids: Iterable[int]) -> str:
        """Return the tokens of some ids, for a message."""
        tokens = [self.tokenizer.convert_ids_to_tokens(n) or str(n) for n in sorted(ids)]
        return ("one of " if len(tokens) > 1 else "") + ", ".join(map(quote, tokens))

    def ids(self) -> dict[str, Any]:
        """Return the arguments of `append_eos_to_table` beside the table.

        No tokenizer: its hash, by which `map` caches, changes when it is used.
        """
        return {
            "eos_id": self.tokenizer.eos_token_id,
            "stop_ids": sorted(self.stop_ids),
            "spaces": self.spaces,
        }


NO_EOS = EosRule(None, frozenset())


def generation_stop_ids(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """Return the tokenizer's EOS token, and those of `generation_config`."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = [*configured] if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(token) for token in (tokenizer.eos_token_id, *ids) if token is not None)


def stop_token_ids(
    tokenizer: Any, generation_config: Any = None, chat_template: str | None = None
) -> frozenset[int]:
    """Return the ids at which generation stops, or an assistant's turn ends.

    These are the tokenizer's EOS token, those of `generation_config`, and the first special token
    that follows an answer in `chat_template` (default: the tokenizer's).
    """
    ids = generation_stop_ids(tokenizer, generation_config)
    chat = ChatTemplate(tokenizer, chat_template)
    with suppress(Exception):  # a template may raise anything
        after = chat.around_answer[1] if chat.exists else ""
        found = [token for token in chat.special_tokens if token and token in after]
        if found:  # of those at one place, the longest, which comes first
            ids |= {tokenizer.convert_tokens_to_ids(min(found, key=after.index))}
    return ids


def note_missing_eos(documents: ArrowDocuments, eos: EosRule) -> str | None:
    """Return a sentence on documents that are trained, but do not end in a trained stop token."""
    if not eos.stop_ids:
        return None
    trained = documents.by_document(
        "labels", lambda ids, ends: _last(ids != IGNORE_INDEX, ends) >= 0
    )
    wrong = np.flatnonzero(trained & ~ends_in_stop_token(documents, eos))
    if not len(wrong):
        return None
    names = eos.names(eos.stop_ids)
    remedy = "set append_eos=True, or end them in one"
    if eos.appends:
        remedy = "their last tokens are not trained: check the completion or assistant masks"
    return (
        f"{len(wrong):,} of {trained.sum():,} documents ({len(wrong) / trained.sum():.1%}) do not "
        f"end in a trained stop token ({names}); {remedy} (the first "
        f"is document {wrong[0]})"
    )


def note_going_on(documents: ArrowDocuments, eos: EosRule) -> str | None:
    """Return a sentence on trained parts behind which generation goes on, None if there are none.

    The last part of a document counts only if it ends in another stop token: `note_missing_eos`.
    """
    if not eos.generation_ids:
        return None
    found = documents.by_document("labels", lambda ids, ends: _first_going_on(ids, ends, eos))
    wrong = np.flatnonzero(found >= 0)
    if not len(wrong):
        return None
    token = int(found[wrong[0]])
    name = eos.names([token])
    remedy = (
        "if the chat template ends earlier answers so, set train_on='every_turn', else end each "
        "answer in a stop token"
    )
    if token in eos.stop_ids:
        remedy = f"set eos_token={name}, or add it to eos_token_id of the generation config"
    return (
        f"{len(wrong):,} of {len(documents):,} documents are trained to end an answer where "
        f"generation goes on ({name} in document {wrong[0]}, the first; it stops at "
        f"{eos.names(eos.generation_ids)}); {remedy}"
    )


def _first_going_on(labels: np.ndarray, offsets: np.ndarray, eos: EosRule) -> np.ndarray:
    """Return the token that ends the first such part of each document; -1 without one."""
    edges = np.flatnonzero(np.diff(labels != IGNORE_INDEX)) + 1
    parts = np.union1d(offsets, edges.clip(offsets[0], offsets[-1]))
    words = _words(labels, eos.spaces)
    ends = _last(words, parts)
    ends = ends[ends >= 0]
    last = _last(words, offsets)
    counted = last[~_holds(labels, last, eos.stop_ids)]
    wrong = np.setdiff1d(ends[~_holds(labels, ends, eos.generation_ids)], counted)[::-1]
    found = np.full(len(offsets) - 1, -1)
    found[np.searchsorted(offsets, wrong, side="right") - 1] = labels[wrong]
    return found


def ends_in_stop_token(documents: ArrowDocuments, eos: EosRule) -> np.ndarray:
    """Return whether the last trained token of each document, no white space, is a stop token."""
    return documents.by_document(
        "labels", lambda ids, ends: _holds(ids, _last(_words(ids, eos.spaces), ends), eos.stop_ids)
    )


def _words(labels: np.ndarray, spaces: Iterable[int]) -> np.ndarray:
    """Return which labels are trained tokens other than white space."""
    return ~np.isin(labels, [IGNORE_INDEX, *spaces])


def _last(wanted: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return where the last True of each list is; -1 where none is."""
    places = np.append(-1, np.flatnonzero(wanted))
    last = places[np.searchsorted(places, offsets[1:]) - 1]
    return np.where(last >= offsets[:-1], last, -1)


def _holds(values: np.ndarray, places: np.ndarray, wanted: Iterable[int]) -> np.ndarray:
    """Return whether there is a place, and one of `wanted` at it."""
    found = places >= 0
    found[found] = np.isin(values[places[found]], list(wanted))
    return found


def append_eos(
    documents: ArrowDocuments, eos: EosRule, *, num_proc: int | None = None, name: str = "train"
) -> ArrowDocuments:
    """Return `documents` ended in EOS.

    EOS is appended, trained, to documents that are trained to their end. If an untrained stop token
    follows the last trained token, it is trained instead. Other documents do not change.
    """
    appended = documents.dataset.with_format("arrow").map(
        append_eos_to_table,
        fn_kwargs=eos.ids(),
        batched=True,
        num_proc=num_proc,
        desc=f"Appending EOS to {name} dataset",
    )
    return ArrowDocuments(appended.with_format(None), documents.columns)


def append_eos_to_table(
    table: pa.Table, eos_id: int, stop_ids: list[int], spaces: list[int]
) -> pa.Table:
    """Return `table` with every document that is trained to its end ending in a stop token."""
    names = token_columns(table.column_names)
    lists = {name: flat_lists(name, table.column(name)) for name in names}
    ids, offsets = lists["input_ids"]
    labels = lists["labels"][0].copy()
    starts, stops = offsets[:-1], offsets[1:]
    ended = _holds(labels, _last(_words(labels, spaces), offsets), stop_ids)
    end = _last(_words(ids, spaces), offsets)
    stands = _holds(ids, end, stop_ids)
    follows = stands & (end > starts)
    follows[follows] = labels[end[follows] - 1] != IGNORE_INDEX
    trained_now = end[follows & ~ended]
    labels[trained_now] = ids[trained_now]
    appends = ~ended & ~stands & (stops > starts)
    appends[appends] = labels[stops[appends] - 1] != IGNORE_INDEX
    at = stops[appends]
    longer = offsets + np.append(0, np.cumsum(appends))
    values = {"input_ids": np.insert(ids, at, eos_id), "labels": np.insert(labels, at, eos_id)}
    if TOKEN_WEIGHTS in lists:
        weights = lists[TOKEN_WEIGHTS][0].copy()
        weights[trained_now] = 1
        values[TOKEN_WEIGHTS] = np.insert(weights, at, 1)
    for name, flat in values.items():
        column = list_column(flat, longer, table.schema.field(name))
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def note_second_bos(documents: ArrowDocuments, tokenizer: Any) -> str | None:
    """Return a sentence on documents that begin with two BOS tokens, None if there are none."""
    bos = getattr(tokenizer, "bos_token_id", None)  # None equals no id

    def has_two(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        pairs = np.flatnonzero((ids[:-1] == bos) & (ids[1:] == bos))
        return np.isin(offsets[:-1], pairs) & (np.diff(offsets) >= 2)

    rows = np.flatnonzero(documents.by_document("input_ids", has_two))
    if not len(rows):
        return None
    return (
        f"{len(rows):,} of {len(documents):,} documents begin with two BOS tokens "
        f"({quote(tokenizer.bos_token)}; the first is document {rows[0]}): the text has one, the "
        "tokenizer adds one; pass messages, or leave BOS out of the text"
    )
