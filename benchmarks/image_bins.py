"""Bins of documents with images: patches of micro-batches, and ranks that wait for each other.

    python benchmarks/image_bins.py --output benchmarks/results/image_bins.md      # about a minute

Documents have the sizes of photographs as Qwen2.5-VL processes them, and answers of 10 to 300
words; one in three has no image, one in ten has three. Costs are those of Qwen2.5-VL 7B. Nothing is
trained: the plans of an epoch are compared.
"""

import argparse
import time

import numpy as np
from machine import provenance, publish, table

from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.patch_bins import patch_budget
from trl_packing.packing.sampler import PackedBatchSampler, attention_cost
from trl_packing.vision.tower_cost import TowerCost

MERGED = 28  # pixels of a side of an image token of Qwen2.5-VL: 2 × 2 patches of 14
MOST_TOKENS = 1280  # of an image, by the processor's default
QWEN = {"width": 3584, "layers": 28, "tower_width": 1280, "tower_layers": 32}
CAPACITY, RANKS = 4096, 8


def documents(number):
    """Return lengths of documents, and the loads of their images."""
    rng = np.random.default_rng(0)
    images = rng.choice([0, 1, 3], number, p=[1 / 3, 1 - 1 / 3 - 0.1, 0.1])
    of_image = np.repeat(np.arange(number), images)
    sides = np.exp(rng.normal(np.log(600), 0.45, (len(of_image), 2)))
    tokens = np.clip((sides // MERGED).prod(1), 4, MOST_TOKENS).astype(np.int64)
    words = np.exp(rng.uniform(np.log(10), np.log(300), number)).astype(np.int64)
    image_tokens = np.bincount(of_image, tokens, number).astype(np.int64)
    fits = image_tokens + words * 4 // 3 + 30 <= CAPACITY
    costs = np.bincount(of_image, cost().of_images(4 * tokens), number).astype(np.int64)
    loads = ImageLoads(images, image_tokens, 4 * image_tokens, costs)
    lengths = image_tokens + words * 4 // 3 + 30
    return lengths[fits], loads.subset(np.flatnonzero(fits))


def cost():
    """Return the cost of the tower of Qwen2.5-VL 7B, four layers of which see whole images."""
    token = 24 * QWEN["width"] ** 2 * QWEN["layers"]
    width, layers = QWEN["tower_width"], QWEN["tower_layers"]
    return TowerCost(24 * width**2 * layers / token, 4 * width * layers / token, 64, 1 - 4 / layers)


def plan(lengths, loads, limit, *, with_costs):
    """Return a row of the table."""
    known = loads.limited(limit)
    if not with_costs:
        known = ImageLoads(known.images, known.tokens, known.patches, 0 * known.costs, limit)
    start = time.process_time()
    sampler = PackedBatchSampler(
        lengths,
        CAPACITY,
        num_ranks=RANKS,
        accumulation=4,
        attention_cost=attention_cost(QWEN["width"]),
        loads=known,
    )
    batches = sampler.micro_batches()
    seconds = time.process_time() - start
    documents_cost = lengths + sampler.attention_cost * lengths**2 + loads.costs
    together = np.array([documents_cost[b].sum() for b in batches]).reshape(-1, RANKS)
    patches = np.array([loads.patches[b].sum() for b in batches])
    assert sampler.num_bins is not None
    waiting = 1 - together.sum() / (together.max(1).sum() * RANKS)
    return [
        f"{limit:,}" if limit else "none",
        "tokens, attention, tower" if with_costs else "tokens, attention",
        f"{sampler.num_bins:,}",
        f"{lengths.sum() / (sampler.num_bins * CAPACITY):.2%}",
        f"{patches.max():,} ({patches.max() / patches.mean():.2f} × mean)",
        f"{waiting:.2%}",
        f"{seconds:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="write the table here, too")
    parser.add_argument("--documents", type=int, nargs="+", default=[20_000, 100_000])
    options = parser.parse_args()
    lines = []
    for number in options.documents:
        lengths, loads = documents(number)
        start = time.process_time()
        limit = patch_budget(lengths, loads.patches, CAPACITY, "bfd")
        found = time.process_time() - start
        rows = [
            plan(lengths, loads, None, with_costs=False),
            plan(lengths, loads, None, with_costs=True),
            plan(lengths, loads, limit, with_costs=True),
        ]
        head = ["limit of patches", "ranks balance", "bins", "filled", "patches of the fullest bin"]
        lines += [
            f"{len(lengths):,} documents, {loads.images.sum():,} images, bins of {CAPACITY:,} "
            f"tokens, {RANKS} ranks × 4; the limit was found in {found:.2f} s:",
            "",
            table([*head, "ranks wait", "s, epoch"], rows),
        ]
    text = ["# Bins of documents with images", "", provenance(("numpy",)), *lines]
    publish("\n".join(text), options.output)


if __name__ == "__main__":
    main()
