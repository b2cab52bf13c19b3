"""The loss of a call on a packed row: the mean over trained tokens, as Trainer divides it."""

from collections.abc import Callable
from typing import Any

from transformers.utils import ModelOutput

from trl_packing.loss.next_token import next_token_loss


def run_with_packed_loss(forward: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Run `forward` without labels, and put the loss into its output."""
    labels, num_items = call.pop("labels", None), call.pop("num_items_in_batch", None)
    output = forward(**call)
    if labels is None:
        return output
    is_tuple = isinstance(output, tuple)
    logits = output[0] if is_tuple else output.logits
    loss = next_token_loss(logits, labels, num_items)
    if is_tuple:
        return (loss, *output)
    others = {name: value for name, value in output.items() if name != "loss"}
    output_type: type[ModelOutput] = type(output)
    return output_type(loss=loss, **others)
