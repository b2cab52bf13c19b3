"""Loss: one weighted mean over the trained tokens of an optimizer step, or of an evaluation set.

Belongs here: log-probabilities, weights in the loss, denominators over micro-batches and ranks.
Does not: which tokens are trained (documents, data), and when a loss is logged (training).

Read `step_loss.py` first.
"""
