"""Settings of a run of one optimizer step, and the gradients of that step."""

from transformers import TrainerCallback

#: A `Trainer` takes one optimizer step, changes no parameter, and logs its loss.
PLAIN_ONE_STEP = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "logging_steps": 1}
PLAIN_ONE_STEP |= {"use_cpu": True, "save_strategy": "no"}
PLAIN_ONE_STEP |= {"report_to": "none", "disable_tqdm": True}
#: The same for trainers of TRL, whose defaults are bf16 and gradient checkpointing.
ONE_STEP = PLAIN_ONE_STEP | {"gradient_checkpointing": False, "bf16": False}


class Keep(TrainerCallback):
    """Keep the gradients of the last optimizer step."""

    gradients: dict

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
