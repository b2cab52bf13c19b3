"""Documents should end in a trained stop token; otherwise a model never learns to stop there.

    tokens     Why  ?  Because  .  <|im_end|>  \\n        the end of a turn, then white space
    labels      .   .  Because  .  <|im_end|>  \\n        ends in a trained stop token
    labels      .   .  Because  .      .       .         untrained stop token: train it
    tokens     Why  ?  Because  .                        trained to the end: append EOS
    labels      .   .  Because  .      .       .  Hm ?   ends untrained: nothing is appended

White space after the stop token is skipped: ChatML ends "<|im_end|>\\n", and TRL trains both.

They should begin with one BOS, too. Where a tokenizer adds one to a text that a chat template has
rendered, there are two, which are counted; TRL trains them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, FlatLists, list_column, token_lists
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS
from trl_packing.formatting.printable import quote

# A text that no chat template contains.
_ANSWER = "Xyzzy-3141"


@dataclass(frozen=True)
class EosRule:
    """The tokens that end a document, and whether EOS is appended where they are missing."""

    tokenizer: Any
    stop_ids: frozenset[int]
    appends: bool = False

    @classmethod
    def from_args(
        cls, args: SFTConfig, tokenizer: Any, processing_class: Any, generation_config: Any
    ) -> "EosRule":
        """Return the rule of a run.

        Args:
            args: its settings.
            tokenizer: its tokenizer, or the one inside its processor.
            processing_class: the tokenizer or the processor, which has its own chat template.
            generation_config: of the model, or None.
        """
        template = None
        if processing_class is not tokenizer:
            template = getattr(processing_class, "chat_template", None)
        stop_ids = stop_token_ids(tokenizer, generation_config, template)
        return cls(tokenizer, stop_ids, PackingOptions.of(args).append_eos)

    @property
    def eos_id(self) -> int:
        """The id to append. Raises ValueError if the tokenizer has no EOS token."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "append_eos=True, but the tokenizer has no eos_token; set eos_token='...' in the "
                "config, or tokenizer.eos_token"
            )
        return self.tokenizer.eos_token_id


def stop_token_ids(
    tokenizer: Any, generation_config: Any = None, chat_template: str | None = None
) -> frozenset[int]:
    """Return the ids at which generation stops, or an assistant's turn ends.

    These are the tokenizer's EOS token, those of `generation_config`, and the special token that
    follows an answer in `chat_template` (default: the tokenizer's).
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
    except Exception:  # a template may raise anything
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
            f"{self.note(append_eos)}: the model may not learn to stop there (the first is "
            f"document {self.row}, ending {quote(self.ending)})"
        )


def documents_without_eos(documents: ArrowDocuments, eos: EosRule) -> MissingEos | None:
    """Return how many `documents` do not end in a trained stop token; None if all do.

    Documents without a trained token are left out. None, too, if there is no stop token.
    """
    if not eos.stop_ids:
        return None
    labels = documents.readers["labels"].chunks
    trained = documents.in_order([_last(*chunk, [IGNORE_INDEX]) >= 0 for chunk in labels])
    wrong = np.flatnonzero(trained & ~documents.in_order(ends_in_stop_token(labels, eos)))
    if not len(wrong):
        return None
    row = int(wrong[0])
    names = (
        eos.tokenizer.convert_ids_to_tokens(stop) or str(stop) for stop in sorted(eos.stop_ids)
    )
    return MissingEos(
        documents=len(wrong),
        of=int(trained.sum()),
        row=row,
        ending=eos.tokenizer.decode(documents[row]["input_ids"][-20:].tolist())[-40:],
        stop_tokens=tuple(names),
    )


def ends_in_stop_token(labels: Iterable[FlatLists], eos: EosRule) -> list[np.ndarray]:
    """Return whether the last trained token of each document is a stop token.

    Args:
        labels: chunks of (values, offsets), a list of labels for each document.
        eos: the stop tokens, and the tokenizer that tells white space, which is skipped.

    Returns:
        One array for each chunk, ``(documents,)`` bool.
    """
    stops = sorted(eos.stop_ids)
    whitespace = _WhitespaceTokens(eos.tokenizer, stops)
    return [
        _holds(values, whitespace.last(values, offsets, IGNORE_INDEX), stops)
        for values, offsets in labels
    ]


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


def end_in_eos(
    documents: ArrowDocuments,
    eos: EosRule,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[ArrowDocuments, MissingEos | None]:
    """Return `documents`, ended in EOS if the rule appends it, and those still without stop token.

    EOS is appended, trained, to documents that are trained to their end. If an untrained stop token
    follows the last trained token, it is trained instead. Documents that end in a trained stop
    token, in other untrained tokens, or have none, do not change.

    Raises:
        ValueError: if EOS is to be appended and the tokenizer has none.
    """
    missing = documents_without_eos(documents, eos)
    if missing is None or not eos.appends:
        return documents, missing
    documents = _append_eos(documents, eos, num_proc, name)
    return documents, documents_without_eos(documents, eos)


def _append_eos(
    documents: ArrowDocuments, eos: EosRule, num_proc: int | None, name: str
) -> ArrowDocuments:
    whitespace = _WhitespaceTokens(eos.tokenizer, eos.stop_ids)
    for column, ignored in (("input_ids", ()), ("labels", (IGNORE_INDEX,))):
        for chunk in documents.readers[column].chunks:
            whitespace.last(*chunk, *ignored)
    # Ids and not the tokenizer: its hash, by which `map` caches, changes when it is used.
    ids = {"stop_ids": sorted(eos.stop_ids), "whitespace_ids": whitespace.ids}
    appended = documents.dataset.with_format("arrow").map(
        append_eos_to_table,
        fn_kwargs={"eos_id": eos.eos_id, **ids},
        batched=True,
        num_proc=num_proc,
        desc=f"Appending EOS to {name} dataset",
    )
    return documents.with_dataset(appended.with_format(None))


def append_eos_to_batch(table: pa.Table, eos: EosRule) -> pa.Table:
    """Return a batch of a stream, changed as `end_in_eos` changes documents."""
    lists = token_lists(table)
    whitespace = _WhitespaceTokens(eos.tokenizer, eos.stop_ids)
    whitespace.last(*lists["input_ids"])
    whitespace.last(*lists["labels"], IGNORE_INDEX)
    return append_eos_to_table(table, eos.eos_id, sorted(eos.stop_ids), whitespace.ids)


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


# --- two BOS tokens -------------------------------------------------------------------------------


def note_second_bos(documents: ArrowDocuments, tokenizer: Any, name: str) -> str | None:
    """Return a sentence on documents that begin with two BOS tokens, None if there are none.

    Args:
        documents: `input_ids` of a data set.
        tokenizer: names BOS; None is returned if it has none.
        name: of the data set, for the sentence.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    chunks = documents.readers["input_ids"].chunks
    found = np.flatnonzero(documents.in_order([_begins_with_two(*chunk, bos) for chunk in chunks]))
    if not len(found):
        return None
    return (
        f"{name} dataset: {len(found):,} of {len(documents):,} documents begin with two BOS tokens "
        f"({quote(tokenizer.bos_token)}; the first is document {found[0]}): the text has one, "
        "and the tokenizer adds one; pass messages instead of text, or leave BOS out of the text"
    )


def _begins_with_two(values: np.ndarray, offsets: np.ndarray, bos: int) -> np.ndarray:
    """Return which lists begin with `bos` twice, ``(lists,)`` bool.

    Args:
        values: token ids of all lists.
        offsets: boundaries of the lists, ``(lists + 1,)``.
        bos: the token id.

    Examples:
        >>> _begins_with_two(np.array([1, 1, 7, 1, 7, 1]), np.array([0, 3, 5, 6]), 1)
        array([ True, False, False])
    """
    found = np.diff(offsets) >= 2
    first = offsets[:-1][found]
    found[found] = (values[first] == bos) & (values[first + 1] == bos)
    return found
