"""Documents with images: their tokens, their pixels and the check that packing changes neither.

    rows             messages, prompts, texts with an `image` or `images` column
       │  images         keep the files, read their sizes from headers
       │  sizes          size of an image → the text that stands for it
       │  documents      rows → tokens, of which some belong to an image
       ▼
    documents        lengths are known; nothing is decoded yet
       │  batch          files of a micro-batch → pixels, positions in three dimensions
       ▼
    a packed row     with `pixel_values`, and the tokens of each document beside its own images

Belongs here: all code that knows of images. Does not: packing, attention and losses, which see
tokens only.

Read `batch.py` first.
"""
