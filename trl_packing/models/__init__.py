"""Models: properties of a model that the rest of the package needs, and care for its state.

Belongs here: lengths, heads and experts in a configuration, sharding, saving and restoring state,
NEFTune, counts of operations. Does not: attention kernels, losses, or the making of documents.

Read `introspection.py` first.
"""
