"""Plain `transformers.Trainer` runs on packed rows, and the documents of their rows."""

from datasets import Dataset
from transformers import Trainer, TrainingArguments

from helpers.model_calls import calling
from helpers.one_step import PLAIN_ONE_STEP, Keep
from helpers.tiny import documents_of_lengths, tiny_tokenizer
from trl_packing import PackedDataset
from trl_packing.attention.model_facts import unwrap_peft

PACK_LEN = 80
LENGTHS = [3, 60, 17, 9, 31, 44, 5, 22, 12, 27, 8, 50, 19, 40, 33, 6]
DOCUMENTS = documents_of_lengths(LENGTHS, prompt=2)


def packing_of(model):
    return unwrap_peft(model).enabled_packing


def leak_in_long_rows(model):
    """Mix all positions of rows of more than 17 tokens, whichever way they are run."""

    def leak(module, inputs, output):
        return output + 0.1 * output.mean() if output.shape[1] > 17 else output

    model.model.embed_tokens.register_forward_hook(leak)
    return model


def packed(documents=DOCUMENTS, **options) -> PackedDataset:
    return PackedDataset(Dataset.from_list(documents), tiny_tokenizer(), PACK_LEN, **options)


def trainer_of(
    model, dataset, folder, *, cls=Trainer, collator=None, callbacks=(), evaluated=None, **options
):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"train_sampling_strategy": "sequential", "output_dir": str(folder)}
    return cls(
        model,
        TrainingArguments(**{**PLAIN_ONE_STEP, **settings, **options}),
        data_collator=collator,
        train_dataset=dataset,
        eval_dataset=evaluated,
        processing_class=tiny_tokenizer() if collator is None else None,
        callbacks=list(callbacks),
    )


def first_step(model, dataset, folder, call=None, **options):
    """Return loss and gradients of a plain Trainer's only step; `call` says what is its loss."""
    kept = Keep()
    cls = calling(call, Trainer) if call else Trainer
    trainer = trainer_of(model, dataset, folder, cls=cls, callbacks=[kept], **options)
    trainer.train()
    return trainer.state.log_history[0]["loss"], kept.gradients


def documents_of_rows(dataset, rows):
    return [DOCUMENTS[i] for row in rows for i in dataset.plan[row]]
