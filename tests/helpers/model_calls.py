"""Losses of a user's own, which call the model in every way."""

import itertools

import torch
import torch.nn.functional as F
from datasets import Dataset
from harness import make_trainer

from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import documents_of_lengths
from trl_packing import PackedSFTTrainer, other_rows

DOCUMENTS = documents_of_lengths([3, 21, 17, 5, 30, 9], prompt=2)


def ids_only(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"]).logits


def mask_of_ones(trainer, model, inputs):
    ids = inputs["input_ids"]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def positions_only(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits


def embedded(trainer, model, inputs):
    bare = trainer.accelerator.unwrap_model(model)
    return model(inputs_embeds=bare.get_input_embeddings()(inputs["input_ids"])).logits


def backbone(trainer, model, inputs):
    bare = trainer.accelerator.unwrap_model(model)
    return bare.lm_head(bare.model(inputs["input_ids"]).last_hidden_state)


def a_copy(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"].clone()).logits


def each_document(trainer, model, inputs):
    pieces = itertools.pairwise(inputs["cu_seq_lens_q"].tolist())
    with other_rows():
        parts = [model(input_ids=inputs["input_ids"][:, a:b]).logits for a, b in pieces]
    return torch.cat(parts, 1)


CALLS = [ids_only, mask_of_ones, positions_only, embedded, backbone, a_copy, each_document]


def calling(call, base):
    """Return a trainer's class whose loss is the mean over trained tokens of what `call` says."""

    class Subclass(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = call(self, model, inputs)
            labels = inputs["labels"]
            total = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            loss = total / (num_items_in_batch or (labels[:, 1:] != -100).sum())
            return (loss, {"logits": logits}) if return_outputs else loss

    return Subclass


def trainer_with(call, folder, *, model="llama", **options):
    """Return a trainer with that loss, and what will keep its gradients."""

    class Subclass(calling(call, PackedSFTTrainer)):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                return self.compute_loss(model, inputs).detach(), None, None

    kept = Keep()
    settings = {**ONE_STEP, "max_length": 96, "prediction_loss_only": True}  # packed rows
    settings |= {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6, **options}
    settings |= {"evaluated": Dataset.from_list(DOCUMENTS), "callbacks": [kept], "cls": Subclass}
    return make_trainer(folder, DOCUMENTS, model, **settings), kept
