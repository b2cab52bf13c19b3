"""Plain `transformers.Trainer` runs on packed rows, and the documents of their rows."""

from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, DefaultDataCollator, Trainer, TrainingArguments

from helpers.one_step import PLAIN_ONE_STEP
from helpers.tiny import documents_of_lengths, tiny_tokenizer
from trl_packing import PackedCollator, PackedDataset
from trl_packing.attention.model_facts import unwrap_peft

PACK_LEN = 80


def packing_of(model):
    return unwrap_peft(model).enabled_packing


def leak_in_long_rows(model):
    """Mix all positions of rows of more than 17 tokens, whichever way they are run."""

    def leak(module, inputs, output):
        return output + 0.1 * output.mean() if output.shape[1] > 17 else output

    model.model.embed_tokens.register_forward_hook(leak)


LENGTHS = [3, 60, 17, 9, 31, 44, 5, 22, 12, 27, 8, 50, 19, 40, 33, 6]
DOCUMENTS = documents_of_lengths(LENGTHS, prompt=2)

COLLATORS = {
    "none": None,
    "default": DefaultDataCollator(),
    "seq2seq, padded": DataCollatorForSeq2Seq(tiny_tokenizer(), pad_to_multiple_of=16),
    "ours": PackedCollator(),
}


def packed(documents=DOCUMENTS, **options) -> PackedDataset:
    return PackedDataset(Dataset.from_list(documents), tiny_tokenizer(), PACK_LEN, **options)


def trainer_of(model, dataset, folder, *, collator=None, callbacks=(), evaluated=None, **options):
    settings = PLAIN_ONE_STEP | {"train_sampling_strategy": "sequential"}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return Trainer(
        model,
        TrainingArguments(str(folder), **settings | options),
        data_collator=collator,
        train_dataset=dataset,
        eval_dataset=evaluated,
        processing_class=tiny_tokenizer() if collator is None else None,
        callbacks=list(callbacks),
    )


def documents_of_rows(dataset, rows):
    return [DOCUMENTS[i] for row in rows for i in dataset.plan[row]]


MATH = [{"q": f"What is {i} + {i}?", "a": f"It is {2 * i}."} for i in range(12)]
