"""Loss: one weighted mean over the trained tokens of an optimizer step, or of an evaluation set.

Belongs here: log-probabilities, weights, denominators over micro-batches and ranks. Does not: which
tokens are trained (documents, data), when a loss is logged (training). Read `step_loss.py` first.
"""
