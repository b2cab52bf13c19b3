"""A user's methods decide whether tokens may be shared, and which count TRL passes on."""

import pytest

from trl_packing.training.user_loss import UserLoss


class Ours:
    compute_loss_func = None

    def compute_loss(self, model, inputs):
        return model(inputs)

    def training_step(self, model, inputs):
        return self.compute_loss(model, inputs)


class OwnLoss(Ours):
    def compute_loss(self, model, inputs):
        return 2 * super().compute_loss(model, inputs)


class StepAround(Ours):
    def training_step(self, model, inputs):
        return super().training_step(model, inputs) + 1


class OwnStep(Ours):
    def training_step(self, model, inputs):
        return model(inputs)


@pytest.mark.parametrize(
    ("cls", "loss", "step"),
    [(Ours, True, True), (OwnLoss, False, False), (StepAround, True, True), (OwnStep, True, False)],
)
def test_the_methods_of_a_subclass_are_told_from_ours(cls, loss, step):
    found = UserLoss(cls(), Ours)
    assert (found.is_ours(), found.step_is_ours()) == (loss, step)


def test_a_method_that_is_set_on_a_built_trainer_is_a_users():
    trainer = Ours()
    found = UserLoss(trainer, Ours)
    assert found.step_is_ours()
    trainer.compute_loss = lambda model, inputs: model(inputs)
    assert not found.is_ours()
    assert not found.step_is_ours()


@pytest.mark.parametrize(
    ("cls", "takes_count", "function", "hides"),
    [
        (Ours, False, None, False),
        (OwnLoss, False, None, True),
        (OwnLoss, True, None, False),
        (OwnLoss, False, len, False),
    ],
)
def test_a_users_loss_gets_no_count_where_trl_passes_none(cls, takes_count, function, hides):
    trainer = cls()
    trainer.compute_loss_func = function
    assert UserLoss(trainer, Ours).hides_count(takes_count) is hides
