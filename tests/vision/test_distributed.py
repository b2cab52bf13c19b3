"""Two ranks train documents with images as one rank with twice the accumulation does."""

import pytest
import torch
from helpers.distributed.images import train
from helpers.distributed.train import launch


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next"])
def test_two_ranks_train_as_one(family, tmp_path):
    """Also where one rank has a micro-batch without images, which leaves its tower unused."""
    launch("helpers.distributed.images", family, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = train(family, tmp_path / "alone")
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ranks[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    for name, parameter in alone["parameters"].items():
        for rank in ranks:
            torch.testing.assert_close(
                rank["parameters"][name.removeprefix("module.")], parameter, rtol=1e-4, atol=1e-5
            )
