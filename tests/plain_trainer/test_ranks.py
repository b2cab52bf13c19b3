"""Plain Trainer on two ranks trains what one rank accumulates."""

import pytest
import torch
from helpers.by_hand import TOLERANCE
from helpers.distributed.plain import runs
from helpers.distributed.ranks import on_ranks
from helpers.plain_runs import packed, trainer_of
from helpers.tiny import tiny_model

from trl_packing import enable_packing


@pytest.mark.slow
def test_two_ranks_train_what_one_rank_accumulates(tmp_path):
    ranks = on_ranks(runs, {"": str(tmp_path)}, tmp_path)[""]
    model, dataset = tiny_model("gpt_oss"), packed(rows_multiple_of=2)
    enable_packing(model)
    options = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.05, "optim": "sgd"}
    trainer = trainer_of(
        model,
        dataset,
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert ranks[0]["fp32"]["losses"] == pytest.approx(losses, rel=TOLERANCE)
    for rank in ranks:
        for name, value in model.state_dict().items():
            close = {"rtol": 0, "atol": 1e-5, "msg": name}
            torch.testing.assert_close(rank["fp32"]["state"][name], value, **close)
        # In bf16, and in evaluation, the check runs inside the forwards of both ranks.
        assert len(rank["bf16"]["checked"]) == 3
        assert rank["bf16"]["losses"] == pytest.approx(losses, rel=2**-6)
    assert ranks[0]["fp32"]["eval_loss"] == ranks[1]["fp32"]["eval_loss"]
