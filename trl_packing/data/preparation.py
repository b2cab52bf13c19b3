"""A user's data set → documents that fit, with every loss counted.

    rows           of any form, tokenized before, or packed before
        │  check       everything that rows and settings alone rule out       (checks)
        │  tokenize    text → tokens and labels, by us or by TRL              (formatting)
        │  EOS         appended if asked for                                  (eos)
        │  fit         cut, split or dropped                                  (overflow)
        │  count       what each stage lost                                   (counts)
        ▼
    documents      each ≤ max_length, each with something to train

A stream passes the same stages; the last three run while it is read (stream). Documents that
`trl-packing prepare` wrote stay as they are, if the run has the rules that made them (prepared).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_packing.data.checks import check, check_not_empty, empty_completions
from trl_packing.data.counting import count_conversations, fit_and_count
from trl_packing.data.counts import Conversations, PreparationCounts
from trl_packing.data.eos import MissingEos, end_in_eos, note_second_bos
from trl_packing.data.overflow import Overflow
from trl_packing.data.prepared import records_of
from trl_packing.data.rules import AnyDataset, Preparation, UserRows
from trl_packing.data.stream import fit_stream
from trl_packing.data.unpadding import cut_padding
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    TURN,
    document_columns,
    token_columns,
)
from trl_packing.formatting.formatting_func import format_per_example
from trl_packing.formatting.prompt_template import column_among
from trl_packing.formatting.responses import ResponseTemplate, label_tokenized
from trl_packing.formatting.tokenize_rows import documents_from_rows

logger = get_logger(__name__)

_OF_ROWS = (*TOKEN_COLUMNS, SEQ_LENGTHS)

# Beside one of these columns, a `text` holds a prompt and its answer, as in tatsu-lab/alpaca.
_COLUMNS_OF_PROMPTS = {
    *("prompt", "messages", "conversations"),
    *("instruction", "question", "query", "response", "answer", "output"),
}


@dataclass(frozen=True)
class Unfitted:
    """Documents of any length, ended in EOS if asked for, before the overflow policy.

    Attributes:
        rows: the user's rows.
        documents: the documents; a stream gets its EOS when it is fitted.
        overflow: the policy of the run.
        notes: sentences on the documents.
        missing: documents without a stop token.
        conversations: those of a data set that were divided into turns.
        hint: a sentence for the report that is no warning.
    """

    rows: UserRows
    documents: AnyDataset
    overflow: Overflow
    notes: tuple[str, ...]
    missing: MissingEos | None = None
    conversations: Conversations = field(default_factory=Conversations)
    hint: str | None = None


def prepare(
    dataset: AnyDataset, rules: Preparation, *, formatting_func: Any = None, name: str = "train"
) -> tuple[AnyDataset, PreparationCounts | None]:
    """Return the documents of `dataset`, and counts of what was kept and lost.

    There are no counts of packed rows, which do not change, nor of a stream, which is counted as it
    is read (`stream.take_counts`).

    Args:
        dataset: the user's rows, of any form.
        rules: of the run.
        formatting_func: the user's function from a row to its text.
        name: of the data set, for messages.

    Raises:
        ValueError: in one sentence, for data that cannot be prepared.
    """
    records = records_of(dataset)
    if len(records) == 1 and records[0].is_whole(dataset):
        records[0].check(rules)
        return dataset, records[0].counts
    return fit(unfitted(dataset, rules, formatting_func=formatting_func, name=name), rules)


def unfitted(
    dataset: AnyDataset, rules: Preparation, *, formatting_func: Any = None, name: str = "train"
) -> Unfitted:
    """Return the documents of `dataset` before the overflow policy; arguments as `prepare`."""
    check_not_empty(dataset, name)
    rows = UserRows.from_dataset(dataset, name, formatting_func)
    overflow = Overflow.from_args(rules.args, rules.packing)
    if records := records_of(dataset):  # a selection, or several sets
        for record in records:
            record.check(rules)
            record.check_columns(dataset)
        return Unfitted(rows, dataset, overflow, ())
    check(rows, rules)
    documents, notes = _tokenize(rows, rules)
    documents, conversations = _count_turns(documents)
    notes.insert(0, _note_empty_completions(rows, rules))
    overflow = replace(overflow, running_text=_is_running_text(rows, rules))
    missing, hint = None, None
    if isinstance(documents, Dataset) and rows.are_packed:
        notes.append(_note_not_found(ArrowDocuments(documents, _OF_ROWS), rows, rules))
    if isinstance(documents, Dataset) and not rows.are_packed:
        whole = ArrowDocuments(_drop_columns(documents, rules), TOKEN_COLUMNS)
        notes.append(_note_not_found(whole, rows, rules))
        notes.append(note_second_bos(whole, rules.eos.tokenizer, name))
        hint = _hint_at_train_on(whole, rows, rules)
        num_proc = rules.args.dataset_num_proc
        whole, missing = end_in_eos(whole, rules.eos, num_proc=num_proc, name=name)
        documents = whole.dataset
    said = tuple(filter(None, notes))
    return Unfitted(rows, documents, overflow, said, missing, conversations, hint)


def _count_turns(documents: AnyDataset) -> tuple[AnyDataset, Conversations]:
    """Return `documents` without the numbers of their turns, and the conversations that made them.

    A stream is counted as it is read.
    """
    if isinstance(documents, IterableDataset) or TURN not in documents.column_names:
        return documents, Conversations()
    turns = documents.data.column(TURN).to_numpy()  # in the order of the rows, also if shuffled
    return documents.remove_columns(TURN), count_conversations(turns)


def fit(whole: Unfitted, rules: Preparation) -> tuple[AnyDataset, PreparationCounts | None]:
    """Return the documents that fit, and counts of what was kept and lost."""
    documents, counts, name = whole.documents, None, whole.rows.name
    if isinstance(documents, IterableDataset) and not whole.rows.are_packed:
        fitted = fit_stream(documents, whole.overflow, rules.eos)
        documents = shuffle_fitted(fitted, rules)
    elif isinstance(documents, Dataset) and not whole.rows.are_packed:
        documents, counts = fit_and_count(
            documents,
            whole.overflow,
            stop_ids=rules.eos.stop_ids,
            num_proc=rules.args.dataset_num_proc,
            name=name,
        )
        documents = shuffle_fitted(documents, rules)
    counts = counts and replace(counts, conversations=whole.conversations)
    if whole.missing is not None and counts is not None:
        logger.warning(f"{name} dataset: {whole.missing.warning(rules.eos.appends)}")
        counts = counts.with_note(whole.missing.note(rules.eos.appends))
    for note in whole.notes:
        logger.warning(note)
        counts = counts and counts.with_note(note)
    if whole.hint and counts:
        counts = counts.with_note(whole.hint)
    return documents, counts


def _hint_at_train_on(documents: ArrowDocuments, rows: UserRows, rules: Preparation) -> str | None:
    """Return a sentence on messages of which every token is trained, the user's too, or None."""
    decided = (rules.options.train_on, rules.options.response_template, rules.labeler)
    if rows.are_tokenized or rows.formatting_func is not None or any(decided):
        return None
    if not ({"messages", "conversations"} & {*rows.columns} and rules.row_format.flags_decide):
        return None
    if documents.num_trained().sum() < np.maximum(documents.lengths() - 1, 0).sum():
        return None
    return (
        "every token of the messages is trained, those of users too, as in TRL; "
        "train_on='assistant' trains the answers alone ('all' keeps this, without the hint)"
    )


def _note_empty_completions(rows: UserRows, rules: Preparation) -> str | None:
    if rows.formatting_func is not None or rows.are_tokenized:
        return None
    has_template = rules.options.prompt_template is not None
    column = column_among(rows.columns, "response") if has_template else "completion"
    return empty_completions(rows.dataset, column, rows.name)


def _is_running_text(rows: UserRows, rules: Preparation) -> bool:
    """Return whether a part of a document makes sense alone."""
    if rows.formatting_func is not None:
        return False
    has_template = rules.options.prompt_template or rules.options.response_template
    return not has_template and not {*rows.columns} & _COLUMNS_OF_PROMPTS


# --- tokenize -------------------------------------------------------------------------------------


def _tokenize(rows: UserRows, rules: Preparation) -> tuple[AnyDataset, list[str | None]]:
    """Return documents of any length with `input_ids` and `labels`, and notes on them."""
    if rows.are_tokenized:
        return _label(rows, rules)
    formatting_func = format_per_example(rows.formatting_func, rows.dataset)
    num_proc, template = rules.args.dataset_num_proc, _response_template(rules)
    if rules.needs_trl:
        documents = rules.by_trl(rows.dataset, formatting_func, rows.name)
        if template is not None:
            documents = label_tokenized(
                documents, completion_only=False, template=template, num_proc=num_proc
            )
        return documents, []
    documents = documents_from_rows(
        rows.dataset,
        replace(rules.row_format, formatting_func=formatting_func, answers=template),
        keeps_columns=not rules.packing,
        document_columns=document_columns(rows.columns, rules.options.named_columns()),
        num_proc=num_proc,
        name=rows.name,
    )
    return _shuffle_unfitted(documents, rules), []


def _label(rows: UserRows, rules: Preparation) -> tuple[AnyDataset, list[str | None]]:
    """Return tokenized rows without padding and with labels, and notes on them."""
    num_proc, name = rules.args.dataset_num_proc, rows.name
    if rows.formatting_func is not None:
        logger.warning(f"the {name} dataset has input_ids: formatting_func is ignored")
    unpadded, padding = cut_padding(rows.dataset, num_proc=num_proc, name=name)
    completion_only = rules.row_format.completion_only
    documents = label_tokenized(
        unpadded,
        completion_only=completion_only,
        template=_response_template(rules),
        num_proc=num_proc,
        name=name,
    )
    return _shuffle_unfitted(documents, rules), [padding]


def _response_template(rules: Preparation) -> ResponseTemplate | None:
    """Return the template of the run: a completion-only collator's, or that of the settings."""
    return rules.row_format.answers if rules.labeler is None else rules.labeler.templates


def _note_not_found(documents: ArrowDocuments, rows: UserRows, rules: Preparation) -> str | None:
    """Return a sentence on documents without the response template, if there are any.

    Raises ValueError if none has it.
    """
    template = _response_template(rules)
    if template is None:
        return None
    not_found = np.flatnonzero(documents.num_trained() == 0)
    if rules.labeler is not None:
        rules.labeler.num_seen += documents.num_documents
        rules.labeler.num_not_found += len(not_found)
    if not len(not_found):
        return None
    ids = documents[int(not_found[0])]["input_ids"]
    if len(not_found) < len(documents) and rows.are_packed:
        return None  # nobody has counted its documents
    words = template.not_found(len(not_found), len(documents), ids)
    if len(not_found) == len(documents):
        raise ValueError(
            f"no document of the {rows.name} dataset has a trained token left: {words}"
        )
    return f"{rows.name} dataset: {words}"


# --- fit ------------------------------------------------------------------------------------------


def _drop_columns(documents: Dataset, rules: Preparation) -> Dataset:
    """Return `documents` with the columns that training reads, if they will be packed."""
    if not rules.packing:
        return documents
    tokens = token_columns(documents.column_names)
    others = document_columns(documents.column_names, rules.options.named_columns())
    return documents.select_columns([*tokens, *others])


# --- shuffle --------------------------------------------------------------------------------------


def _drops_before_shuffling(documents: AnyDataset, rules: Preparation) -> bool:
    """Return whether documents that do not fit are dropped before the shuffle, as TRL does."""
    # Without a capacity TRL drops nothing, so its stream has no counterpart of `fit_stream`, and
    # `datasets` shuffles the results of a function in another order than tables.
    if isinstance(documents, IterableDataset) and rules.args.max_length is None:
        return False
    return not rules.packing and not is_packed(documents)


def _shuffle_unfitted(documents: AnyDataset, rules: Preparation) -> AnyDataset:
    """Return `documents`, shuffled if the config asks for it and TRL would shuffle them here."""
    if not rules.args.shuffle_dataset or _drops_before_shuffling(documents, rules):
        return documents
    return documents.shuffle(seed=rules.args.seed)


def shuffle_fitted(fitted: AnyDataset, rules: Preparation) -> AnyDataset:
    """Return `fitted`, shuffled if the config asks for it and TRL would shuffle it here."""
    if not rules.args.shuffle_dataset or not _drops_before_shuffling(fitted, rules):
        return fitted
    return fitted.shuffle(seed=rules.args.seed)
