"""Documents that probe isolation: what to put before B, and B.

Probes reach as far as the data: some rope variants look at the longest position of the whole batch,
so a short probe passes on a model that a long document contaminates (by 5.0, Phi-3 longrope).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from trl_packing.models.introspection import length_constants, rope_thresholds

SHORT = "short documents"

# Fewer tokens than these say little about attention: the first one sees only itself.
MIN_TOKENS = 17
_ROOM = 40


class Probe(NamedTuple):
    name: str
    before: list[list[np.ndarray]]  # documents to put before B, of two contents and two lengths
    document: np.ndarray  # B
    room: int  # tokens that one document may have: learned positions end somewhere


def probes(
    model: nn.Module,
    documents: Sequence[Sequence[int] | np.ndarray],
    max_length: int,
    thorough: bool = False,
) -> list[Probe]:
    """Return the probes of a run on `documents`, or of any run up to `max_length` without them.

    `thorough` adds documents of like length beside each other, which padded rows put into one
    forward: an index that looks for the best keys goes wrong there for some contents only.
    """
    rng = np.random.default_rng(0)
    draw = random_tokens(model, rng)
    # 23 tokens twice, for what depends on content alone; 19, to share a padded forward with B, and
    # as many as B, to share one of equal lengths.
    before = [[draw(23)], [draw(23)], [draw(11)], [draw(19), draw(5)], [draw(MIN_TOKENS)], []]
    made = [Probe(SHORT, before, draw(MIN_TOKENS), _ROOM)]
    given = sorted((np.asarray(d, dtype=np.int64) for d in documents), key=len)
    if given and len(given[-1]) > 1:
        longest = given[-1]
        # As short as the data has them: what tells the longest document's row from a short one's
        # shows beside a document on the other side of a threshold.
        least = max(MIN_TOKENS, len(given[0]))
        other = next((d for d in given if len(d) >= least), longest)[:least]
    else:
        reach = [c for c in length_constants(model) if c < max_length]
        if given or not reach:
            return made
        # Beyond a threshold of rope there must be room for two lengths.
        beyond = max(reach) // 4 + 23 if max(reach) in rope_thresholds(model) else 7
        longest, other = draw(max(reach) + beyond), draw(19)
    size = len(longest)
    # Contaminated, B continues what is before it, which takes room.
    room = max(size, _ROOM)
    other, most = other[: room - 13], longest[: room - 13]
    made.append(Probe(f"after {size:,} tokens", [[longest]], other, room))
    # Long after long: two may share a forward of padded rows, and dynamic NTK's frequencies.
    shorter = most if len(most) < 2 * MIN_TOKENS else most[: len(most) * 9 // 10]
    made.append(Probe(f"of {len(shorter):,} tokens", [[draw(len(most)), draw(13)]], shorter, room))
    if thorough:
        made += [*_alike(draw, len(most), room), *_alike(draw, MIN_TOKENS * 2, room)]
    return made


def _alike(draw: Callable[[int], np.ndarray], length: int, room: int) -> list[Probe]:
    """Return a probe for each of four documents that fill one forward, with all padding allowed."""
    documents = [draw(max(2, length * percent // 100)) for percent in (100, 88, 84, 80)]
    filler = draw(length // 2)  # no forward has more cells than the row has tokens
    return [
        Probe(
            f"of {len(document):,} tokens among its like",
            [[filler, *(other for other in documents if other is not document)]],
            document,
            room,
        )
        for document in documents
    ]


def random_tokens(model: Any, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Return a function that draws so many tokens that `model` can read and write."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(embeddings, "num_embeddings", None) or next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2
    )
    # An image token without an image is an error in vision-language models.
    config = getattr(model, "config", None)
    named = [v for k, v in vars(config).items() if k.endswith("token_id")] if config else []
    special = [i for v in named for i in (v if isinstance(v, (list, tuple)) else [v])]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # Not every token that goes in can come out (mllama's image tokens, cpmant's prompts).
    size = min(size, getattr(head, "out_features", None) or size)
    usable = np.setdiff1d(np.arange(size), [i for i in special if isinstance(i, int)])
    usable = usable if len(usable) > 1 else np.arange(size)
    return lambda length: rng.choice(usable, length).astype(np.int64)
