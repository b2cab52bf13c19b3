"""With packing=False, a micro-batch holds the documents of a padded run's micro-batch."""

from itertools import chain

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from helpers.drop_in import assert_same_run, sgd_run
from helpers.steps import steps_in
from torch.utils.data import BatchSampler
from trl import SFTTrainer

from trl_packing import PackedBatchSampler, PackedSFTTrainer


class MeanOfMicroBatch:
    """A user's loss: the mean over the micro-batch, whatever the rest of the step holds."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Ours(MeanOfMicroBatch, PackedSFTTrainer):
    pass


class Theirs(MeanOfMicroBatch, SFTTrainer):
    pass


SETTINGS = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "rows": 22}


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_a_loss_that_is_the_mean_of_its_micro_batch_trains_as_in_trl(tmp_path, strategy):
    settings = SETTINGS | {"train_sampling_strategy": strategy}
    ours, theirs = (sgd_run(tmp_path, cls, **settings) for cls in (Ours, Theirs))
    assert_same_run(ours, theirs, ("loss", "grad_norm"))


@pytest.mark.parametrize("number", [24, 31, 35, 36])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_take_turns_on_the_batches_of_a_padded_run(number, ranks):
    lengths = np.random.default_rng(number).integers(1, 50, number)
    options = {"documents_per_step": 4 * ranks * 2, "accumulation": 2, "num_ranks": ranks}
    batches = BatchSampler(range(number), batch_size=4, drop_last=False)
    found = []
    for rank in range(ranks):
        sampler = PackedBatchSampler(
            lengths, rank=rank, shuffle=False, divide_by_cost=False, **options
        )
        theirs = list(BatchSamplerShard(batches, ranks, rank, even_batches=False))
        whole = number // (4 * ranks)  # in the last round, transformers repeats documents
        assert list(sampler)[:whole] == theirs[:whole]
        assert len(list(sampler)) == len(sampler) == -(-number // (4 * ranks))
        found += [document for batch in sampler for document in batch]
        assert all(sampler)
    assert sorted(found) == list(range(number))


def test_documents_per_step_divides_steps_by_cost_instead():
    """The control: the same steps, in micro-batches that a padded run does not have."""
    lengths = np.random.default_rng(0).integers(1, 50, 36)
    kept, divided = (
        PackedBatchSampler(lengths, documents_per_step=12, accumulation=3, divide_by_cost=by_cost)
        for by_cost in (False, True)
    )
    assert [*map(sorted, kept)] != [*map(sorted, divided)]
    for ours, theirs in zip(steps_in(kept), steps_in(divided), strict=True):
        assert sorted(chain(*ours)) == sorted(chain(*theirs))
