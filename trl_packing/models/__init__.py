"""Models: questions that the rest of the package asks of a model, and how it is left as it was.

Belongs here: what a configuration says about lengths and heads, how a model is sharded, its state
before and after a probe, its operations. Does not: attention, losses, or anything about documents.

Read `introspection.py` first.
"""
