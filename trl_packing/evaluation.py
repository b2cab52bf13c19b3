"""The loss of a whole evaluation set, whatever it was cut into and whoever computed it.

a batch            Σ w · loss, Σ w        of all tokens, and of those of each source
    │  add
a rank             the same sums, of all of its batches
    │  reduce
eval_loss          Σ w · loss / Σ w       one mean over the whole set
"""

import math

import torch
from torch import Tensor

from trl_packing.document_columns import Sources
from trl_packing.token_metrics import TokenSums


class EvaluationSums:
    """Σ w · loss and Σ w of what this rank has evaluated: of all, then of each source.

    sums: ``(1 + sources, 2)`` float64 on the CPU.
    tokens: entropy and accuracy of the same tokens.
    """

    def __init__(self, sources: Sources | None = None):
        self.sources = sources
        self.tokens = TokenSums()
        self.sums = torch.zeros(1 + (len(sources.names) if sources else 0), 2, dtype=torch.float64)

    def add(self, loss: Tensor, total: Tensor) -> None:
        """Add a batch: its mean loss, and the sum of its weights."""
        # Of a batch without trained tokens label smoothing makes 0 / 0.
        share = torch.where(total > 0, loss.detach().float() * total, 0.0)
        self.sums[0] += torch.stack([share, total]).double().cpu()

    def add_by_source(self, losses: Tensor, weights: Tensor, source_ids: Tensor) -> None:
        """Add the weighted losses of all targets, ``(rows, T - 1)`` as their weights and ids."""
        rows = 1 + source_ids.flatten().cpu()
        for column, values in enumerate((losses, weights)):
            self.sums[:, column].index_add_(0, rows, values.flatten().cpu().double())

    def metrics(self, reduced: Tensor, prefix: str, *, is_likelihood: bool) -> dict[str, float]:
        """Return the metrics of `reduced`, the `sums` of all ranks; none without trained tokens.

        is_likelihood: the loss is a mean negative log-likelihood, which has a perplexity.
        """
        (loss, total), *by_source = reduced.tolist()
        if not total:
            return {}
        found = {f"{prefix}_loss": loss / total}
        if is_likelihood:
            found[f"{prefix}_perplexity"] = perplexity(loss / total)
        if self.sources is not None:
            counts = self.sources.num_documents.tolist()
            for name, count, (loss, total) in zip(
                self.sources.names, counts, by_source, strict=True
            ):
                found[f"{prefix}_num_documents_{name}"] = count
                if total:
                    found[f"{prefix}_loss_{name}"] = loss / total
        return found


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, infinite where a float cannot hold it.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
