"""Losses of a user's own, which call the model in every way."""

import itertools

import torch
import torch.nn.functional as F
from datasets import Dataset

from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from trl_packing import PackedSFTConfig, PackedSFTTrainer

DOCUMENTS = documents_of_lengths([3, 21, 17, 5, 30, 9], prompt=2)


def ids_only(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"]).logits


def by_position(trainer, model, inputs):
    return model(inputs["input_ids"]).logits


def mask_of_the_batch(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")).logits


def mask_of_ones(trainer, model, inputs):
    ids = inputs["input_ids"]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def whole_batch_and_ones(trainer, model, inputs):
    mask = torch.ones_like(inputs["input_ids"])
    return model(**{k: v for k, v in inputs.items() if k != "labels"}, attention_mask=mask).logits


def positions_only(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits


def counted_positions(trainer, model, inputs):
    ids = inputs["input_ids"]
    return model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits


def with_a_cache(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"], use_cache=True).logits


def embedded(trainer, model, inputs):
    bare = trainer.accelerator.unwrap_model(model)
    return model(inputs_embeds=bare.get_input_embeddings()(inputs["input_ids"])).logits


def backbone(trainer, model, inputs):
    bare = trainer.accelerator.unwrap_model(model)
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    return bare.lm_head(bare.model(inputs["input_ids"]).last_hidden_state)


def unwrapped(trainer, model, inputs):
    return trainer.accelerator.unwrap_model(model)(input_ids=inputs["input_ids"]).logits


def without_the_last_token(trainer, model, inputs):
    logits = model(input_ids=inputs["input_ids"][:, :-1]).logits
    return F.pad(logits, (0, 0, 0, 1))


def a_copy(trainer, model, inputs):
    return model(input_ids=inputs["input_ids"].clone()).logits


def each_document(trainer, model, inputs):
    ends = inputs["cu_seq_lens_q"].tolist()
    pieces = itertools.pairwise(ends)
    return torch.cat([model(input_ids=inputs["input_ids"][:, a:b]).logits for a, b in pieces], 1)


CALLS = [
    ids_only,
    by_position,
    mask_of_the_batch,
    mask_of_ones,
    whole_batch_and_ones,
    positions_only,
    counted_positions,
    with_a_cache,
    embedded,
    backbone,
    unwrapped,
    without_the_last_token,
    a_copy,
    each_document,
]


def trainer_with(call, folder, *, in_training_step=False, model=None, peft=None, **options):
    """Return a trainer whose loss is the mean over trained tokens of what `call` says."""

    class Subclass(PackedSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits, labels = call(self, model, inputs), inputs["labels"]
            total = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            loss = total / (num_items_in_batch or (labels[:, 1:] != -100).sum())
            return (loss, {"logits": logits}) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                return self.compute_loss(model, inputs).detach(), None, None

    class Stepping(Subclass):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    kept = Keep()
    settings = {
        **ONE_STEP,
        "output_dir": str(folder),
        "max_length": 96,
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 6,
        "prediction_loss_only": True,  # packed rows in evaluation too
    }
    trainer = (Stepping if in_training_step else Subclass)(
        tiny_model("llama") if model is None else model,
        PackedSFTConfig(**settings | options),
        train_dataset=Dataset.from_list(DOCUMENTS),
        eval_dataset=Dataset.from_list(DOCUMENTS),
        processing_class=tiny_tokenizer(),
        callbacks=[kept],
        peft_config=peft,
    )
    return trainer, kept
