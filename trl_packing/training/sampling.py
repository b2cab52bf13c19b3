"""The samplers of one run, made from its trainer: the documents of each micro-batch."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from trl import SFTTrainer

from trl_packing.attention.model_facts import layer_values, text_config
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.mixture import Mixture, mixture_of
from trl_packing.training.sampler_settings import SamplerSettings, prefix_index

_MOST_KEPT = 8  # data sets whose index, or whose loads of images, are kept

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Sampling:
    """Makes the samplers of one run.

    Args:
        trainer: its model, arguments and ranks are read.

    Attributes:
        packing: pack training documents into bins.
        eval_packing: the same for evaluation.
        torch_seed: seed of torch's global generator when training starts.
        mixture: of the training set that was sampled last; None if its sources are not known.
        draws_groups: returns whether groups of documents with common prefixes are drawn, in
            training or evaluation.
        image_loads: returns the loads of the images of documents; None without images.
    """

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer
        self.packing = False
        self.eval_packing = False
        self.torch_seed: int | None = None
        self.mixture: Mixture | None = None
        self.draws_groups: Callable[[bool], bool] = lambda training: False
        self.image_loads: Callable[[ArrowDocuments], ImageLoads | None] = lambda documents: None
        self._indexes: dict[int, tuple[ArrowDocuments, PrefixIndex]] = {}
        self._loads: dict[tuple[int, bool], tuple[ArrowDocuments, ImageLoads | None]] = {}

    @property
    def ranks(self) -> tuple[int, int]:
        """Number of data-parallel ranks, and this rank."""
        # Tensor-parallel ranks must see the same batch.
        trainer = self.trainer
        shared = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
        return trainer.args.world_size // shared, trainer.args.process_index // shared

    @property
    def batch_size(self) -> int:
        """Bins or documents of a training micro-batch, as `auto_find_batch_size` has left it."""
        return self.trainer._train_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step of one rank."""
        return self.trainer.args.gradient_accumulation_steps

    @property
    def hidden_size(self) -> int | None:
        """The largest hidden size of the model's layers; None if it names none."""
        sizes = layer_values(text_config(self.trainer.model), "hidden_size")
        return max(sizes, default=None)

    def agree_on_seed(self) -> None:
        """Take rank 0's seed for the order of documents, which accelerate draws from torch's."""
        args = self.trainer.args
        seed = args.seed if self.trainer.model_init is not None else torch.initial_seed()
        self.torch_seed = broadcast_object_list([seed])[0]

    def for_training(self, documents: ArrowDocuments) -> PackedBatchSampler:
        """Return the sampler of `documents`."""
        settings = self._of_training()
        self.mixture = mixture = mixture_of(documents, self.trainer.args)
        return settings.training_sampler(
            documents,
            index=self._index(documents) if self.draws_groups(True) else None,
            mixture=mixture,
            loads=self._limited_loads(settings, documents),
        )

    def for_evaluation(self, documents: ArrowDocuments) -> PackedBatchSampler:
        """Return the sampler of an evaluation set."""
        settings = self._settings(self.eval_packing, self.trainer.args.eval_batch_size)
        has_groups = self.draws_groups(False) and not is_packed(documents)
        return settings.evaluation_sampler(
            documents,
            index=self._index(documents) if has_groups else None,
            loads=self._limited_loads(settings, documents),
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings on which the micro-batches of an epoch depend."""
        groups = self.draws_groups(True)
        return self._of_training().of_plan(groups=groups, mixture=self.mixture)

    def _of_training(self) -> SamplerSettings:
        return self._settings(self.packing, self.batch_size)

    def _settings(self, packing: bool, batch_size: int) -> SamplerSettings:
        return SamplerSettings(
            self.trainer.args,
            packing,
            batch_size,
            *self.ranks,
            hidden_size=self.hidden_size,
            torch_seed=self.torch_seed,
        )

    def _limited_loads(
        self, settings: SamplerSettings, documents: ArrowDocuments
    ) -> ImageLoads | None:
        """Return the loads of the images of a data set, made once."""

        def make() -> ImageLoads | None:
            loads = self.image_loads(documents)
            return loads and settings.limited_loads(loads)

        key = id(documents.dataset), settings.packing
        return _made_once(self._loads, key, documents, make)

    def _index(self, documents: ArrowDocuments) -> PrefixIndex:
        """Return the index of a data set, made once."""
        make = partial(prefix_index, documents)
        return _made_once(self._indexes, id(documents.dataset), documents, make)


def _made_once(
    made: dict[Key, tuple[ArrowDocuments, Value]],
    key: Key,
    documents: ArrowDocuments,
    make: Callable[[], Value],
) -> Value:
    """Return what `make` returns, from `made` if it is there, which holds a few data sets.

    The documents are held beside it, because the key has their `id`.
    """
    if key not in made:
        if len(made) == _MOST_KEPT:
            del made[next(iter(made))]
        made[key] = documents, make()
    return made[key][1]
