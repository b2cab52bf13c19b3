"""Plain Trainer on two ranks trains what one rank accumulates."""

import pytest
import torch
from helpers.distributed.plain import runs, train_an_epoch
from helpers.distributed.ranks import on_ranks


@pytest.mark.slow
def test_two_ranks_train_what_one_rank_accumulates(tmp_path):
    ranks = on_ranks(runs, {"": str(tmp_path)}, tmp_path)[""]
    alone = train_an_epoch(tmp_path, gradient_accumulation_steps=2)
    assert ranks[0]["fp32"]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for rank in ranks:
        torch.testing.assert_close(rank["fp32"]["state"], alone["state"], rtol=0, atol=1e-5)
        # In bf16, and in evaluation, the check runs inside the forwards of both ranks.
        assert len(rank["bf16"]["checked"]) == 3
        assert rank["bf16"]["losses"] == pytest.approx(alone["losses"], rel=2**-6)
    assert ranks[0]["fp32"]["eval_loss"] == ranks[1]["fp32"]["eval_loss"]
