"""Documents with images: their tokens, their pixels and the check that packing changes neither.

Rows keep their files (`images`), whose sizes give the text that stands for each (`sizes`), and so
the tokens of documents (`documents`). Pixels are decoded with a micro-batch (`batch`).

Belongs here: all code that knows of images. Does not: packing, attention and losses, which see
tokens only. Read `batch.py` first.
"""
