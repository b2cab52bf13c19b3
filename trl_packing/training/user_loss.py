"""The methods that compute the loss of a step: ours, or a user's in a subclass or on the trainer.

compute_loss     ours         weights each token, and is passed the number of trained tokens
                 a user's     is passed what TRL passes it, and may call ours
training_step    ours         calls `compute_loss`
                 a user's     may call either of ours, or compute another loss
"""

from trl import SFTTrainer


class UserLoss:
    """Knows whether a user's method computes the loss of a run.

    Args:
        trainer: its methods are read at each call, because a user may set others.
        ours: the class whose methods are ours.
    """

    def __init__(self, trainer: SFTTrainer, ours: type[SFTTrainer]):
        self.trainer = trainer
        self.ours = ours

    def is_ours(self) -> bool:
        """Return whether `compute_loss` is ours."""
        found = getattr(self.trainer.compute_loss, "__func__", None)
        return found is self.ours.compute_loss and not self.is_between()

    def is_between(self) -> bool:
        """Return whether a class between ours and `SFTTrainer` computes the loss."""
        classes = type(self.trainer).__mro__
        behind = classes[classes.index(self.ours) + 1 :]
        owner = next((c for c in behind if "compute_loss" in vars(c)), SFTTrainer)
        return owner is not SFTTrainer

    def step_is_ours(self) -> bool:
        """Return whether a user's `training_step`, if there is one, takes its loss from ours."""
        step = getattr(self.trainer.training_step, "__func__", self.trainer.training_step)
        names = getattr(getattr(step, "__code__", None), "co_names", ())
        calls_ours = not {"compute_loss", "training_step"}.isdisjoint(names)
        return self.is_ours() and (step is self.ours.training_step or calls_ours)

    def hides_count(self, takes_count: bool) -> bool:
        """Return whether `compute_loss` is a user's, which gets no number of items from TRL.

        Args:
            takes_count: whether the model class takes the number of trained tokens of a step.
        """
        takes_count = takes_count or self.trainer.compute_loss_func is not None
        return not (self.is_ours() or takes_count)
