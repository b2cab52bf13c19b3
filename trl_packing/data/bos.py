"""Documents should begin with one BOS token, as the model has read them in pretraining.

text       <s>[INST] Why?        rendered by a chat template, which writes BOS
tokens     <s> <s> [INST] …      the tokenizer adds BOS to any text: TRL trains this, too
"""

from typing import Any

import numpy as np

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.formatting.printable import quote


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
