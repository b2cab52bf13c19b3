"""A user's data set → documents that fit, with every loss counted.

    rows           of any form, tokenized before, or packed before
        │  check, tokenize (by us or by TRL), append EOS, fit
    documents      each ≤ max_length, each with something to train

Of a stream, EOS and fit run while it is read. Prepared documents stay as they are, if the run has
the rules that made them (files).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from trl.data_utils import get_dataset_column_names

from trl_packing.data.bad_rows import (
    check_columns,
    check_not_empty,
    check_not_padded,
    check_packed_rows,
    check_weights_have_tokens,
)
from trl_packing.data.chat_template import PASS_FAST
from trl_packing.data.counts import PreparationCounts, handled_in
from trl_packing.data.files import records_of
from trl_packing.data.fitting import fit_and_count
from trl_packing.data.messages import has_flags
from trl_packing.data.printable import escape_hidden
from trl_packing.data.responses import label_tokenized
from trl_packing.data.row_format import one_text_each
from trl_packing.data.rules import Rules
from trl_packing.data.stop_tokens import (
    append_eos,
    note_going_on,
    note_missing_eos,
    note_second_bos,
)
from trl_packing.data.stream import fit_stream, with_equal_columns
from trl_packing.data.tokenize_rows import (
    can_prepare,
    documents_from_rows,
    notes_on_unread,
)
from trl_packing.documents.arrow import AnyDataset, ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    HANDLED,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    document_columns,
    token_columns,
)
from trl_packing.documents.weights import document_weights_from_rows

logger = get_logger(__name__)

# Documents, and what was kept and lost; None of packed rows, or of a stream, counted as it is read.
Prepared: TypeAlias = tuple[AnyDataset, PreparationCounts | None]


class WholeDocuments(NamedTuple):
    """Documents of any length, before the overflow policy; a stream gets its EOS when it is fitted.

    `found` are notes for the report, and the turns of conversations.
    """

    documents: AnyDataset
    found: PreparationCounts = PreparationCounts()


def prepare(dataset: AnyDataset, rules: Rules, name: str = "train") -> Prepared:
    """Return the documents of `dataset`, of rows of any form, and counts of what was lost.

    Packed rows, which do not change, have no counts, nor has a stream, which is counted as it is
    read (`stream.take_counts`). Raises ValueError, in one sentence, for data that cannot be used.
    """
    records = records_of(dataset)
    if len(records) == 1 and records[0].is_whole(dataset):
        records[0].check(rules)
        return dataset, records[0].counts
    return fit_documents(whole_documents(dataset, rules, name), rules, name)


def whole_documents(dataset: AnyDataset, rules: Rules, name: str = "train") -> WholeDocuments:
    """Return the documents of `dataset` before the overflow policy; arguments as `prepare`."""
    check_not_empty(dataset, name)
    if records := records_of(dataset):  # a selection, or several sets
        for record in records:
            record.check(rules)
        return WholeDocuments(dataset)
    dataset = with_equal_columns(dataset)
    columns = get_dataset_column_names(dataset)
    _check(dataset, columns, rules, name)
    documents = _tokenize(dataset, columns, rules, name)
    if isinstance(documents, IterableDataset):
        return WholeDocuments(documents)
    if is_packed(documents):
        _note_not_found(ArrowDocuments(documents, (*TOKEN_COLUMNS, SEQ_LENGTHS)), rules, name)
        return WholeDocuments(documents)
    found = PreparationCounts()
    if HANDLED in documents.column_names:
        found = handled_in(documents.data.column(HANDLED).to_numpy())
        documents = documents.remove_columns(HANDLED)
    if not rules.keeps_columns:
        kept = document_columns(documents.column_names, rules.options.named_columns())
        documents = documents.select_columns([*token_columns(documents.column_names), *kept])
    tokens = ArrowDocuments(documents, TOKEN_COLUMNS)
    eos = rules.eos
    if eos.appends and note_missing_eos(tokens, eos) is not None:
        tokens = append_eos(tokens, eos, num_proc=rules.args.dataset_num_proc, name=name)
    possible = (
        note_missing_eos(tokens, eos),
        note_going_on(tokens, eos),
        _note_not_found(tokens, rules, name),
        note_second_bos(tokens, eos.tokenizer),
    )
    notes = [note for note in possible if note is not None]
    for note in (*found.stages, *notes):
        logger.warning(f"{name} dataset: {note}")
    is_text = rules.formatting_func is not None or "input_ids" in columns
    is_unasked = rules.response_template is None and rules.row_format.flags_decide
    if not is_text and {"messages", "conversations"} & {*columns} and is_unasked:
        most = np.maximum(tokens.lengths() - 1, 0).sum()
        if tokens.num_trained().sum() >= most:
            notes.append(_HINT)
    return WholeDocuments(tokens.dataset, replace(found, notes=tuple(notes)))


def fit_documents(whole: WholeDocuments, rules: Rules, name: str = "train") -> Prepared:
    """Return the documents that fit, and counts of what was kept and lost."""
    documents = whole.documents
    if isinstance(documents, IterableDataset):
        documents = fit_stream(documents, rules.overflow, rules.eos)
        return shuffle(documents, rules, fitted=True), None
    if is_packed(documents):
        return documents, None
    documents, counts = fit_and_count(
        documents,
        rules.overflow,
        stop_ids=rules.eos.stop_ids,
        num_proc=rules.args.dataset_num_proc,
        name=name,
    )
    return shuffle(documents, rules, fitted=True), whole.found + counts


def shuffle(documents: AnyDataset, rules: Rules, *, fitted: bool) -> AnyDataset:
    """Return `documents`, shuffled if the config asks for it and TRL would shuffle them here."""
    # Without packing, TRL drops the documents that do not fit before it shuffles.
    drops_first = not rules.packing and not is_packed(documents)
    # Without a capacity TRL drops nothing of a stream, and `datasets` shuffles the results of a
    # function in another order than tables.
    if isinstance(documents, IterableDataset) and rules.args.max_length is None:
        drops_first = False
    if not rules.args.shuffle_dataset or drops_first != fitted:
        return documents
    return documents.shuffle(seed=rules.args.seed)


def _check(dataset: AnyDataset, columns: Sequence[str], rules: Rules, name: str) -> None:
    """Raise ValueError for anything that the rows and the settings alone rule out."""
    eos, options = rules.eos, rules.options
    check_weights_have_tokens(columns, name)
    is_rendered = rules.formatting_func is not None or options.prompt_template is not None
    if "input_ids" in columns or not is_rendered:
        check_columns(dataset, name, rules.args.dataset_text_field)
    if isinstance(dataset, Dataset):
        if DOCUMENT_WEIGHT in columns:
            document_weights_from_rows(dataset, name)
        check_not_padded(dataset, name)
    if "input_ids" in columns:
        template = None if rules.labeler is not None else options.response_template
        present = [column for column in ("labels", *MASK_COLUMNS) if column in columns]
        if template is not None and present:
            raise ValueError(
                f"the {name} dataset has {present[0]!r} and response_template={template!r} is "
                "set: both say what is trained"
            )
        if SEQ_LENGTHS in columns:
            if eos.appends:
                raise ValueError(
                    f"append_eos=True, but the {name} dataset is packed already; leave it out"
                )
            check_packed_rows(dataset, rules.args.max_length, name)
    if eos.appends and eos.tokenizer.eos_token_id is None:
        raise ValueError(
            "append_eos=True, but the tokenizer has no eos_token; set eos_token in the config"
        )


_BY_TRL = (
    "TRL's code prepares it, because {} renders or tokenizes in a way of its own; " + PASS_FAST
)


def _prepare_by_trl(
    dataset: AnyDataset, rules: Rules, formatting_func: Any, name: str
) -> AnyDataset:
    """Return the documents that TRL's code makes of rows that ours cannot tokenize."""
    why = _BY_TRL.format(type(rules.processing_class).__name__)
    names = ("train_on", "response_template", "prompt_template")
    ignored = [each for each in names if getattr(rules.options, each) is not None]
    if rules.row_format.flags_decide and has_flags(dataset, next(iter(dataset))):
        ignored.append("'train' or 'weight' of messages")
    if ignored:
        raise ValueError(f"{ignored[0]} cannot be used on the {name} dataset: {why}")
    try:
        documents = rules.by_trl(dataset, formatting_func, name, rules.row_format.completion_only)
        first: dict[str, Any] = next(iter(documents), {})
    except Exception as error:  # mistral-common has kinds of its own
        if rules.formatting_func is not None:
            raise  # with the traceback of the user's own function
        reason = escape_hidden(str(error))
        raise ValueError(f"the {name} dataset cannot be prepared: {reason}; {why}") from error
    eos = rules.eos.tokenizer.eos_token
    text = rules.eos.tokenizer.decode(first.get("input_ids", []), skip_special_tokens=True)
    if eos and text.endswith(eos):
        logger.warning(
            f"documents of the {name} dataset end in the text {eos!r}, which is not the stop token "
            f"here: {why}, or rows of input_ids"
        )
    return documents


def _tokenize(dataset: AnyDataset, columns: Sequence[str], rules: Rules, name: str) -> AnyDataset:
    """Return documents of any length with `input_ids` and `labels`."""
    num_proc = rules.args.dataset_num_proc
    template = rules.response_template
    if "input_ids" in columns:
        if rules.formatting_func is not None:
            logger.warning(f"the {name} dataset has input_ids: formatting_func is ignored")
        documents = label_tokenized(
            dataset,
            completion_only=rules.row_format.completion_only,
            template=template,
            num_proc=num_proc,
            name=name,
        )
        return shuffle(documents, rules, fitted=False)
    if SEQ_LENGTHS in columns:  # of rows that were packed, and are not
        dataset = dataset.remove_columns(SEQ_LENGTHS)
    formatting_func = one_text_each(rules.formatting_func, next(iter(dataset)))
    if not can_prepare(rules.processing_class):
        documents = _prepare_by_trl(dataset, rules, formatting_func, name)
        if template is None:
            return documents
        return label_tokenized(
            documents, completion_only=False, template=template, num_proc=num_proc
        )
    row_format = replace(rules.row_format, formatting_func=formatting_func, answers=template)
    documents = documents_from_rows(
        dataset,
        row_format,
        keeps_columns=rules.keeps_columns,
        document_columns=document_columns(columns, rules.options.named_columns()),
        num_proc=num_proc,
        name=name,
    )
    for note in notes_on_unread(dataset, row_format, name):
        logger.warning(note)
    return shuffle(documents, rules, fitted=False)


def _note_not_found(documents: ArrowDocuments, rules: Rules, name: str) -> str | None:
    """Return a sentence on documents without the response template; ValueError if none has it."""
    template = rules.response_template
    if template is None:
        return None
    not_found = np.flatnonzero(documents.num_trained() == 0)
    number = len(not_found)
    if not number:
        return None
    of = len(documents)
    ids = documents[int(not_found[0])]["input_ids"]
    words = template.not_found(f"{number:,} of {of:,} documents ({number / of:.1%})", ids)
    if number == of:
        raise ValueError(f"no document of the {name} dataset has a trained token left: {words}")
    return words


_HINT = (
    "every token of the messages is trained, those of users too, as in TRL; "
    "train_on='assistant' trains the answers alone ('all' keeps this, without the hint)"
)
