"""Probes: a document B, and packed rows that hold it.

They are as long as the data. Some rope variants depend on the longest position of the batch, so a
short probe passes on a model that a long document contaminates (by 5.0, Phi-3 longrope).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trl_packing.attention.model_facts import (
    layer_values,
    length_constants,
    native_implementation,
    rope_thresholds,
    text_config,
)
from trl_packing.data.limits import learned_positions
from trl_packing.packing.prefix_tree import build_prefix_tree

SHORT = "short documents"

# Shorter documents show little of attention: the first token attends only to itself.
MIN_TOKENS = 17
_ROOM = 40  # tokens of a contaminated row
_MOST_BYTES = 4 * 2**30  # for attention scores and masks of a document alone

# The check compares this many of the first positions of B, where a leak is strongest, and of the
# last ones.
_POSITIONS = 32

Document = Mapping[str, Any]  # `input_ids` ``(T,)`` int64, and `images` in a run with images
Draw = Callable[[int], np.ndarray]


class Row(NamedTuple):
    """A packed row, and the positions in it that are compared, ``(P,)``.

    Rows with the same list of documents run once.
    """

    documents: Sequence[Document]
    at: np.ndarray


class Probe(NamedTuple):
    """A document B, and rows in which its outputs must be those of B alone."""

    name: str  # in the report
    document: Document
    at: np.ndarray  # positions of B that are compared, but not its last one, ``(P,)``
    packed: list[Row]  # with B as one of their documents
    # The first of these rows as one document, at the first positions: the effect of a full leak.
    contaminated: list[Row]


def probes(
    model: nn.Module,
    documents: Sequence[Sequence[int] | np.ndarray],
    max_length: int,
    thorough: bool = False,
) -> list[Probe]:
    """Return the probes for a run on `documents`; `check_isolation` has the arguments.

    `thorough` adds documents of similar length, which padded rows put into one forward. Sparse
    attention that selects keys by an index fails there, on some contents.
    """
    draw = random_tokens(model)
    positions = learned_positions(model) or max_length + _ROOM
    few = min(MIN_TOKENS, positions // 2)
    room = min(_ROOM, positions)
    made = [_short(draw, few, room)]
    if index := max(layer_values(text_config(model), "index_topk"), default=0):
        # Sparse attention keeps so many keys: of the document, or of the row if it ignores masks.
        made += _behind([draw(index)], {f"behind {index:,} tokens": draw(few)}, room)
    longest, other = _longest_and_other(model, documents, max_length, few, draw)
    if not len(longest):
        return _contaminated_in_one_row(made)
    most = longest[: longest_alone(model)]
    before = [draw(13)] if len(most) == len(longest) else [draw(len(longest)), draw(13)]
    given = {f"of {len(most):,} tokens": most, f"after {len(longest):,} tokens": other[: len(most)]}
    made += _behind(before, given, room)
    if thorough:
        # Two long documents may share a padded forward, and the frequencies of dynamic NTK.
        shorter = most[: max(2, len(most) * 9 // 10)]
        name = f"of {len(shorter):,} tokens behind {len(most):,}"
        made += _behind([draw(len(most)), draw(13)], {name: shorter}, room)
        made += [*_alike(draw, len(most), room), *_alike(draw, MIN_TOKENS * 2, room)]
    return _contaminated_in_one_row(made)


def _longest_and_other(
    model: nn.Module, documents: Sequence[Any], max_length: int, few: int, draw: Draw
) -> tuple[np.ndarray, np.ndarray]:
    """Return the longest of `documents` and one that is as short as any, both empty without any."""
    given = sorted((np.asarray(d, dtype=np.int64) for d in documents), key=len)
    if given and len(given[-1]) > 1:
        # As short as the data's shortest document: a model that treats rows with the longest
        # document differently shows it on a document at the other side of a threshold.
        least = max(few, len(given[0]))
        return given[-1], next((d for d in given if len(d) >= least), given[-1])[:least]
    reach = max((c for c in length_constants(model) if c < max_length), default=0)
    if given or not reach:
        return draw(0), draw(0)
    # Beyond a threshold of rope there must be room for two different lengths.
    return draw(reach + (reach // 4 + 23 if reach in rope_thresholds(model) else 7)), draw(19)


def _short(draw: Draw, few: int, room: int) -> Probe:
    """Return the probe of a document of `few` tokens."""
    ids = draw(few)
    # Twice 23 tokens, to show what depends on content alone.
    first, second = [_behind([draw(23)], {SHORT: ids}, room)[0] for _ in range(2)]
    # B opens a row, too. 19 tokens share a padded forward with B, as many as B one of equal
    # lengths.
    documents = [first.document]
    packed = [*first.packed, *second.packed, Row(documents, first.at)]
    for others in ([11], [19, 5], [few]):
        documents += [{"input_ids": draw(length)} for length in others]
        start = sum(len(document["input_ids"]) for document in documents)
        packed.append(Row(documents, start + first.at))
        documents.append(first.document)
    return first._replace(packed=packed, contaminated=first.contaminated + second.contaminated)


def _alike(draw: Draw, length: int, room: int) -> list[Probe]:
    """Return a probe for each of four documents that fill one padded forward."""
    made = {}
    for percent in (100, 88, 84, 80):
        document = draw(max(2, length * percent // 100))
        made[f"of {len(document):,} tokens among similar ones"] = document
    # A padded forward has at most as many cells as the row has tokens.
    return _behind([draw(length // 2)], made, room)


def _behind(before: list[np.ndarray], given: dict[str, np.ndarray], room: int) -> list[Probe]:
    """Return a probe of each document `given`, by its name: they follow others in one packed row.

    Contaminated rows fit into `room`, half of it for the start of B, where a leak is strongest.
    """
    every = [*before, *given.values()]
    documents = [{"input_ids": ids} for ids in every]
    made = []
    for i, (name, ids) in enumerate(given.items(), len(before)):
        at = _at_both_ends(np.arange(len(ids) - 1))  # the last position predicts nothing
        in_front = np.concatenate(every[:i])
        start = ids[: room // 2]
        whole = np.concatenate([in_front, start])[-room:]
        packed = Row(documents, len(in_front) + at)
        behind = len(whole) - len(start) + at[at < len(start) - 1]
        made.append(Probe(name, documents[i], at, [packed], [Row([{"input_ids": whole}], behind)]))
    return made


def _contaminated_in_one_row(made: list[Probe]) -> list[Probe]:
    """Return the probes with contaminated rows, a document each, that run as one row."""
    documents: list[Document] = []
    start = 0
    found = []
    for probe in made:
        rows = []
        for row in probe.contaminated:
            rows.append(Row(documents, start + row.at))
            documents.extend(row.documents)
            start += len(row.documents[0]["input_ids"])
        found.append(probe._replace(contaminated=rows))
    return found


def _at_both_ends(positions: np.ndarray) -> np.ndarray:
    return np.union1d(positions[:_POSITIONS], positions[-_POSITIONS:])


def prefix_probes(model: nn.Module, documents: Sequence[np.ndarray]) -> list[Probe]:
    """Return probes of documents that share a prefix, for rows that compute it once.

        alone          [P · B]            without packing: the reference
        shared         [P · B, P · C]     in one row, computed as P, B, C; also with another C
        contaminated   [P · C · B]        as one document

    The longest of the documents is cut into a prefix and a branch.
    """
    draw = random_tokens(model)
    prefix, branch = draw(29), draw(17)
    rows = [[draw(11), draw(5)], [draw(11), draw(5)], [draw(23)]]
    made = [_sharing("short documents that share a prefix", prefix, branch, rows)]
    longest = max((np.asarray(d, np.int64) for d in documents), key=len, default=np.zeros(0))
    # A contaminated row is a quarter longer.
    most = min(longest_alone(model), (learned_positions(model) or sys.maxsize) * 4 // 5)
    longest = longest[:most]
    half = len(longest) // 2
    if half > 40:
        rows = [[draw(half // 2)], [draw(half // 2)]]
        name = f"documents that share {half:,} tokens"
        made.append(_sharing(name, longest[:half], longest[half:], rows))
    return made


def _sharing(
    name: str, prefix: np.ndarray, branch: np.ndarray, siblings: list[list[np.ndarray]]
) -> Probe:
    ids = np.concatenate([prefix, branch])
    # Positions that predict the tokens of the branch behind its first. Windows that reach across
    # the fork end soon behind it.
    at = _at_both_ends(np.arange(len(prefix), len(ids) - 1))
    document = {"input_ids": ids}
    packed = []
    contaminated = []
    for branches in siblings:
        others = [np.concatenate([prefix, other]) for other in branches]
        places = build_prefix_tree([ids, *others]).targets[at + 1] - 1
        packed.append(Row([document, *({"input_ids": x} for x in others)], places))
        whole = np.concatenate([prefix, *branches, branch])
        contaminated.append(Row([{"input_ids": whole}], at + len(whole) - len(ids)))
    return Probe(name, document, at, packed, contaminated[:2])


def longest_alone(model: Any) -> int:
    """Return the tokens of the longest document that native attention runs alone in some GiB."""
    bytes_of_pair = _bytes_of_pair(model)
    if not bytes_of_pair:
        return sys.maxsize
    bound = _MOST_BYTES
    parameter = next(model.parameters())
    if parameter.is_cuda:
        bound = min(bound, torch.cuda.mem_get_info(parameter.device)[0] // 2)
    return max(_ROOM, int((bound / bytes_of_pair) ** 0.5))


def _bytes_of_pair(model: Any) -> int:
    """Return the bytes that native attention takes for each pair of tokens of a document."""
    config = text_config(model)
    parameter = next(model.parameters())
    size = parameter.element_size()
    heads = max(layer_values(config, "num_attention_heads"), default=1)
    native = native_implementation(model)
    if native == "eager":
        return heads * (size + 4)  # the scores, and their softmax in float32
    if native != "sdpa":
        return 0
    # Windows and chunks: a mask of booleans, and the same in the dtype of the model.
    taken = 1 + size if length_constants(model) else 0
    key_heads = min(layer_values(config, "num_key_value_heads"), default=heads)
    if parameter.is_cuda and key_heads < heads:
        is_half = parameter.dtype in (torch.bfloat16, torch.float16)
        is_new = torch.cuda.get_device_capability(parameter.device) >= (8, 0)
        widest = max(layer_values(config, "head_dim"), default=0)
        if not (is_half and is_new and widest <= 256):
            taken += heads * 8  # FlashAttention takes grouped heads; others write float32 scores
    return taken


def random_tokens(model: Any, seed: int = 0) -> Draw:
    """Return a function that draws tokens for `model`, at most as many as it has positions."""
    rng = np.random.default_rng(seed)
    every = np.arange(_vocabulary_size(model))
    # Vision-language models raise an error for an image token without an image.
    special: list[int] = []
    for name, value in vars(getattr(model, "config", None) or nn.Identity()).items():
        if name.endswith(("token_id", "token_index")):
            ids = value if isinstance(value, (list, tuple)) else [value]
            special += [i for i in ids if isinstance(i, int)]
    usable = np.setdiff1d(every, special)
    usable = usable if len(usable) > 1 else every
    most = learned_positions(model)
    return lambda length: rng.choice(usable, min(length, most or length)).astype(np.int64)


def _vocabulary_size(model: Any) -> int:
    """Return the number of tokens that a model both reads and predicts."""
    embeddings = head = None
    if hasattr(model, "get_input_embeddings"):
        embeddings = model.get_input_embeddings()
        head = model.get_output_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    if size is None:
        of_modules = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        size = next(of_modules, 2)
    # Some tokens can be read but not predicted: mllama's image tokens, cpmant's prompts, padding of
    # musicgen, which has a head for each codebook.
    parts = head.modules() if isinstance(head, nn.Module) else ()
    predicted: Any = next((m.out_features for m in parts if hasattr(m, "out_features")), size)
    return min(size, predicted)
