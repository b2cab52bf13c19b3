"""The collator of a run that has not started, as its trainer would make it.

The trainer's own (training/collators.py) belongs to a trainer, which has a model.
"""

import copy
from types import SimpleNamespace

from trl_packing.attention.backends import NATIVE_ATTENTION
from trl_packing.config import PackingOptions
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.packing.static_shapes import StaticShapes
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import config_of


def collator_of(run: PreviewedRun, sampler: PackedBatchSampler) -> PackedCollator:
    """Return the collator of a run, without the pixels of its images.

    Args:
        run: the run.
        sampler: of its training set.

    Raises:
        ValueError: `static_shapes` is set, and the model is not known.
    """
    args, options = run.args, PackingOptions.of(run.args)
    multiple = args.pad_to_multiple_of or getattr(run.collator, "pad_to_multiple_of", None)
    collator = PackedCollator(run.preparation.eos.tokenizer.pad_token_id, multiple)
    if isinstance(run.collator, PackedCollator):
        collator = copy.copy(run.collator)
    collator.loss_weighting = options.loss_weighting
    collator.tensors_only = True
    collator.shares_prefixes = _may_share(options, collator) and not run.images.packs
    if options.static_shapes:
        if run.model is None:
            raise ValueError("static_shapes=True depends on the model's config; name the model")
        collator.static_shapes = StaticShapes.for_model(
            SimpleNamespace(config=config_of(run.model, args)),
            capacity=args.max_length,
            bins=args.per_device_train_batch_size,
            most_documents=None if sampler.rows else sampler.most_documents(),
            longest=None if sampler.rows else int(sampler.lengths.max()),
            pad_to_multiple_of=multiple,
        )
    return collator


def _may_share(options: PackingOptions, collator: PackedCollator) -> bool:
    """Return whether documents share prefixes, as far as it is known without the model."""
    is_ours = type(collator).__call__ is PackedCollator.__call__
    takes_keys = options.attention not in NATIVE_ATTENTION
    return options.prefix_sharing != "off" and not options.static_shapes and is_ours and takes_keys
