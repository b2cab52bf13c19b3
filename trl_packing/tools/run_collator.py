"""The collator of a run that has not started, as its trainer would make it.

The trainer's own (training/collators.py) belongs to a trainer, which has a model.
"""

from types import SimpleNamespace
from typing import Any

from trl_packing.config import PackingOptions
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.packing.static_shapes import StaticShapes
from trl_packing.tools.previewed_run import PreviewedRun
from trl_packing.tools.settings import config_of


def collator_of(run: PreviewedRun, sampler: PackedBatchSampler, model: Any) -> PackedCollator:
    """Return the collator of a run.

    Args:
        run: the run.
        sampler: of its training set.
        model: a name or a model; its config decides the shapes of `static_shapes`.

    Raises:
        ValueError: `static_shapes` is set without a model.
    """
    args, options = run.args, PackingOptions.of(run.args)
    shapes = None
    if options.static_shapes:
        if model is None:
            raise ValueError("static_shapes=True depends on the model's config; name the model")
        most = None if sampler.rows else sampler.most_documents()
        shapes = StaticShapes.for_model(
            SimpleNamespace(config=config_of(model, args)),
            capacity=args.max_length,
            bins=args.per_device_train_batch_size,
            most_documents=most,
            pad_to_multiple_of=args.pad_to_multiple_of,
        )
    return PackedCollator(
        run.preparation.eos.tokenizer.pad_token_id,
        pad_to_multiple_of=args.pad_to_multiple_of,
        loss_weighting=options.loss_weighting,
        static_shapes=shapes,
        tensors_only=True,
    )
