"""Streaming: micro-batches from an iterable data set, with a bounded buffer.

Belongs here: the shards of a reader, windows of documents, positions for resuming. Does not:
the packing of a window (packing), and the losses of preparation (data).

Read `reader.py` first.
"""
