"""Draw twelve documents: padded, packed in one row, and packed in bins for two epochs.

    python recipes/multipack_picture.py [--color]

This is the example of axolotl's page on multipack: a context of 4,096 tokens, four documents a
batch, one character for 256 tokens (the page counts the padding at the end as part of L). Without
FlashAttention, attention runs on one document of the row at a time, so there is no mask of
16,384 × 16,384 to draw. The output (tests/tools/test_show.py compares it):

    Padded to the longest of each batch, three steps:

    AAAAAAAAAAA
    BBBBBB·····
    CCCCCCC····
    DDDD·······

    EEEEEEEE
    FFFFF···
    GGG·····
    HHHH····

    III··
    JJJJ·
    KKKKK
    LLL··

    34% padding; to 4,096 tokens it would be 67%.

    Packed, one step, one row in four lines, with boundaries instead of a mask:

    AAAAAAAAAAABBBBB
    BCCCCCCCDDDDEEEE
    EEEEFFFFFGGGHHHH
    IIIJJJJKKKKKLLL·

    cu_seqlens / 256: [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 63]
    attention inside documents: 10% of the row's square

    Bins of 4,096 tokens, no document cut, new bins every epoch:

    epoch 0
    CCCCCCCKKKKKLLL·
    BBBBBB··········
    EEEEEEEEJJJJGGG·
    AAAAAAAAAAADDDD·
    FFFFFHHHHIII····

    epoch 1
    CCCCCCCFFFFFHHHH
    EEEEEEEEKKKKK···
    BBBBBBJJJJDDDD··
    AAAAAAAAAAAGGG··
    LLLIII··········
"""

import argparse
from typing import Any

import torch

from trl_packing import cu_seqlens_from_lengths, pack, show_rows

CONTEXT = 4096
CELL = 256  # tokens for each character
BATCH = 4
LENGTHS = [n * CELL for n in (11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3)]


def main(color: bool = False) -> None:
    picture: dict[str, Any] = {"tokens_per_cell": CELL, "color": color}
    cells = 0
    print("Padded to the longest of each batch, three steps:\n")
    for start in range(0, len(LENGTHS), BATCH):
        batch = LENGTHS[start : start + BATCH]
        letters = [[start + i] for i in range(BATCH)]
        rows = [[length] for length in batch]
        print(show_rows(rows, documents=letters, capacity=max(batch), **picture), end="\n\n")
        cells += BATCH * max(batch)
    tokens = sum(LENGTHS)
    print(f"{1 - tokens / cells:.0%} padding; to {CONTEXT:,} tokens it would be ", end="")
    print(f"{1 - tokens / (CONTEXT * len(LENGTHS)):.0%}.\n")

    print("Packed, one step, one row in four lines, with boundaries instead of a mask:\n")
    (row,) = pack(LENGTHS, BATCH * CONTEXT, "next_fit")
    lengths = [LENGTHS[i] for i in row]
    print(show_rows([lengths], capacity=BATCH * CONTEXT, cells_per_line=16, **picture))
    boundaries = cu_seqlens_from_lengths(torch.tensor(lengths)) // CELL
    print(f"\ncu_seqlens / {CELL}: {boundaries.tolist()}")
    inside = sum(n * n for n in LENGTHS)
    across = (BATCH * CONTEXT) ** 2
    print(f"attention inside documents: {inside / across:.0%} of the row's square\n")

    print(f"Bins of {CONTEXT:,} tokens, no document cut, new bins every epoch:")
    for epoch in range(2):
        bins = pack(LENGTHS, CONTEXT, seed=(0, epoch))
        rows = [[LENGTHS[i] for i in documents] for documents in bins]
        print(f"\nepoch {epoch}")
        print(show_rows(rows, documents=[b.tolist() for b in bins], capacity=CONTEXT, **picture))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--color", action="store_true", help="background colors, for a terminal")
    main(**vars(parser.parse_args()))
