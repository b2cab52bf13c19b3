"""`PackedSFTTrainer` with a loss of the user's that names the tokens only."""

from helpers.model_calls import CALLS, trainer_with

# A step of all documents: two rows, one a rank. Unwrapped, DDP reduces no gradients.
OPTIONS = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 3, "max_length": 48}
NAMES = ("ids_only", "mask_of_ones", "a_copy", "embedded")


def called_outside_of_train(folder: str) -> str:
    """What a packed call says in a loop of the user's own, where ranks cannot check together."""
    trainer, _ = trainer_with(CALLS[0], folder, **OPTIONS)
    batch = next(iter(trainer.get_train_dataloader()))
    try:
        trainer.model.train()(**{key: value for key, value in batch.items() if key != "labels"})
    except RuntimeError as error:
        return str(error)
    return "it ran"


def steps(folder: str) -> tuple[str, dict]:
    """Return what a call outside of training says, and loss and gradients of each kind of call."""
    result = {}
    refusal = called_outside_of_train(folder)
    for call in CALLS:
        if call.__name__ in NAMES:
            trainer, kept = trainer_with(call, folder, **OPTIONS)
            trainer.train()
            result[call.__name__] = (trainer.state.log_history[0]["loss"], kept.gradients)
    return refusal, result
