"""The epoch of a run with every value of `prefix_sharing`, each really planned.

off      every document is computed as it is
bin      documents that happen to lie in one row compute their common prefix once
group    documents with a common prefix are brought into one row
"""

from dataclasses import dataclass

import numpy as np

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.tools.plan.what_if import Setup

# A smaller share of tokens that all documents could save together is not shown.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Sharing:
    """An epoch with one value of `prefix_sharing`.

    Attributes:
        name: the value.
        steps: optimizer steps.
        prefixes_per_step: mean number of groups in a step; None without groups.
        tokens: of the documents.
        computed: tokens that their rows compute, without padding.
        largest: the most of them in a micro-batch.
        is_run: the run has this value.
    """

    name: str
    steps: int
    prefixes_per_step: float | None
    tokens: int
    computed: int
    largest: int
    is_run: bool


def ways_to_share(documents: ArrowDocuments, setup: Setup) -> tuple[Sharing, ...]:
    """Return the epoch with each value; nothing if documents have hardly a prefix in common.

    Nothing either for a mixture, which draws some documents several times.

    Args:
        documents: that fit.
        setup: of the run.
    """
    args, options = setup.args, PackingOptions.of(setup.args)
    if is_packed(documents) or options.static_shapes or setup.draw is not None:
        return ()
    index, lengths = PrefixIndex.of(documents), documents.lengths()
    in_one_row = index.computed_tokens(lengths, index.order, np.array([0, len(lengths)]))
    if in_one_row[0] > (1 - _LEAST_SHARE) * lengths.sum():
        return ()
    ways = [_way("off", index, lengths, setup), _way("bin", index, lengths, setup)]
    if find_strategy(args.packing_strategy).shuffles:
        groups = group_documents(index, lengths, args.max_length, options.prefix_group_size)
        ways.append(_way("group", index, lengths, setup.with_groups(groups)))
    return tuple(ways)


def _way(name: str, index: PrefixIndex, lengths: np.ndarray, setup: Setup) -> Sharing:
    setup = setup if name == "group" else setup.with_groups(None)
    sampler = setup.sampler(lengths)
    batches = sampler.micro_batches()
    drawn, offsets = np.concatenate(batches), np.cumsum([0, *map(len, batches)])
    tokens = np.diff(np.concatenate([[0], np.cumsum(lengths[drawn])])[offsets])
    computed = tokens if name == "off" else index.computed_tokens(lengths, drawn, offsets)
    return Sharing(
        name,
        -(-len(batches) // (setup.ranks * sampler.accumulation)),
        sampler.groups_per_step(),
        int(tokens.sum()),
        int(computed.sum()),
        int(computed.max()),
        name == PackingOptions.of(setup.args).prefix_sharing,
    )
