"""The text of each token, so that the texts of a document's tokens add up to the document.

ids        [I] [ like] [ na] [ï] [ve]        " na" and not "na": a space may belong to a token
bytes      [😀: byte 1] [2] [3] [4]           "" "" "" "😀": the last one completes the character
"""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A decoder looks at few tokens before the current one: for a space, or the bytes of a character.
CONTEXT = 4


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to the document, "" for parts of a character.

    Args:
        ids: tokens of one document.
        tokenizer: decodes them.
    """
    texts: list[str] = []
    done = 0  # tokens whose text is known
    for end in range(1, len(ids) + 1):
        first = max(done - CONTEXT, 0)
        before = _decode(ids[first:done], tokenizer)
        text = _decode(ids[first:end], tokenizer)
        is_last = end == len(ids)
        if text.endswith(_UNFINISHED) and not is_last and end - done < 2 * CONTEXT:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        done = end
    return texts


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) if len(ids) else ""
