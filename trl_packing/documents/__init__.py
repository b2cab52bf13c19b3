"""Documents: one tokenized training example each, as lengths, boundaries, labels and weights.

Belongs here: anything that can be said of documents without a model, a configuration or a data set
of somebody else. Does not: rules that make documents and cut them (data), or put them together
(packing). Read `boundaries.py` first.
"""
