"""The loss of a whole evaluation set, independent of its batches and of the number of ranks.

a batch            Σ w · loss, Σ w        of all tokens, and of the tokens of each source
    │  add
a rank             the same sums, of all of its batches
    │  reduce
eval_loss          Σ w · loss / Σ w       one mean over the whole set
"""

import math

import torch
from torch import Tensor

from trl_packing.loss.sources import Sources, SourceTargets
from trl_packing.loss.token_metrics import TokenSums


class EvaluationSums:
    """Σ w · loss and Σ w of the batches that this rank has evaluated.

    Attributes:
        sums: ``(1 + sources, 2)`` float64 on the CPU: of all batches, then of each source.
        tokens: entropy and accuracy of the same tokens.
        is_scored: whether any batch was added. A user's `compute_loss` may never add one.
    """

    def __init__(self, sources: Sources | None = None):
        self.sources = sources
        self.is_scored = False
        self.tokens = TokenSums()
        self.sums = torch.zeros(1 + (len(sources.names) if sources else 0), 2, dtype=torch.float64)

    def add(self, loss: Tensor, total: Tensor) -> None:
        """Add a batch by its mean loss and the `total` of its weights."""
        self.is_scored = True
        # Label smoothing computes 0 / 0 for a batch without trained tokens.
        share = torch.where(total > 0, loss.detach().float() * total, 0.0)
        self.sums[0] += torch.stack([share, total]).double().cpu()

    def add_by_source(self, targets: SourceTargets, losses: Tensor) -> None:
        """Add the `losses` of a batch, as `SourceTargets.add_to` takes them."""
        targets.add_to(self.sums, losses)

    def metrics(self, reduced: Tensor, prefix: str, *, is_likelihood: bool) -> dict[str, float]:
        """Return the metrics of all ranks; none without trained tokens.

        Args:
            reduced: the `sums` of all ranks.
            prefix: of the names of metrics.
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
