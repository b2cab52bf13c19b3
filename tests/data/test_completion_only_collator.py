"""The collator that TRL removed: labels by a template, padded or flat, in any trainer."""

import pytest
import torch
from datasets import Dataset
from harness import QUIET
from helpers.drop_in import trained_losses
from helpers.merging import merging_tokenizer
from helpers.tiny import tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig

from trl_packing import DataCollatorForCompletionOnlyLM, PackedCollator, PackedSFTTrainer

ANSWER = " ### Answer:"
# One token an entry: the test tokenizer gives ids 10 to 13 to characters of their own.
R, I = [10, 11], [12, 13]  # noqa: E741


def collator_of(response=R, instruction=None, **options):
    options.setdefault("tokenizer", tiny_tokenizer())
    return DataCollatorForCompletionOnlyLM(response, instruction, **options)


# --- batches --------------------------------------------------------------------------------------

TWO = [{"input_ids": [50, 10, 11, 60, 61]}, {"input_ids": [10, 11, 62]}]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_are_padded_on_the_side_of_the_tokenizer(side):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    batch = collator_of(tokenizer=tokenizer, pad_to_multiple_of=4)(TWO)
    expected = tokenizer.pad(TWO, pad_to_multiple_of=4, return_tensors="pt")
    expected["labels"] = expected["input_ids"].masked_fill(expected["input_ids"] < 60, -100)
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(batch[name], values, rtol=0, atol=0)


IMPOSSIBLE = [
    ({"mlm": True}, ValueError, "mlm=True"),
    ({"response": ""}, ValueError, "response_template is empty"),
    ({"mlm_probabilty": 0.1}, TypeError, "mlm_probabilty"),
    ({"tokenizer": tiny_tokenizer(pad=None)}, ValueError, "padding token"),
]


@pytest.mark.parametrize(("options", "error", "sentence"), IMPOSSIBLE)
def test_what_it_cannot_do_is_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        collator_of(**options)(TWO)


# --- with transformers' own Trainer ---------------------------------------------------------------

ROWS = [
    {"instruction": question, "output": answer}
    for question, answer in [
        ("Why?", "Because."),
        ("Who wrote this, and who read it?", "Beatrice."),
        ("Who?", "Nobody in particular, as far as anyone can remember."),
        ("Is naïve spelled with two dots?", "Yes — and café has an accent."),
    ]
    * 8
]


SETTINGS = QUIET | {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1}
SETTINGS |= {"num_train_epochs": 1, "per_device_train_batch_size": 8}
SETTINGS |= {"train_sampling_strategy": "sequential"}


def texts() -> list[str]:
    return [f"### Question: {r['instruction']}\n ### Answer: {r['output']}<eos>" for r in ROWS]


def old_collate(examples):
    """TRL's labels: by the template's ids, as the documents have them, in a padded batch."""
    tokenizer = tiny_tokenizer()
    response = tokenizer.encode(ANSWER, add_special_tokens=False)
    batch = tokenizer.pad([{"input_ids": e["input_ids"]} for e in examples], return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    size = len(response)
    for row in labels:
        ids = row.tolist()
        starts = [i for i in range(len(ids)) if ids[i : i + size] == response]
        row[: starts[-1] + size] = -100
    return {**batch, "labels": labels}


def losses_in_transformers(folder, collate) -> list[float]:
    dataset = Dataset.from_dict({"input_ids": tiny_tokenizer()(texts())["input_ids"]})
    arguments = TrainingArguments(str(folder), **SETTINGS)
    model = tiny_model("llama")
    return trained_losses(Trainer(model, arguments, train_dataset=dataset, data_collator=collate))


@pytest.fixture(scope="module")
def old_losses(tmp_path_factory):
    """The padded run on the old labels. This tokenizer's template alone reads as in a document."""
    found = losses_in_transformers(tmp_path_factory.mktemp("old"), old_collate)
    assert len(found) == 4
    return found


# Float32, two layers: rounding of another order of summation.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.mark.parametrize("padding_free", [False, True])
def test_alone_in_transformers_trainer_the_loss_is_the_old_one(tmp_path, padding_free, old_losses):
    ours = losses_in_transformers(tmp_path, collator_of(ANSWER, padding_free=padding_free))
    torch.testing.assert_close(ours, old_losses, **CLOSE)


# --- with PackedSFTTrainer ------------------------------------------------------------------------


def formatting_prompts_func(example):
    pairs = zip(example["instruction"], example["output"], strict=True)
    return [f"### Question: {question}\n ### Answer: {answer}" for question, answer in pairs]


def trainer_of(folder, collator, rows=ROWS, *, formatting_func=formatting_prompts_func, **changes):
    """The tokenizer is that of the collator."""
    return PackedSFTTrainer(
        tiny_model("llama"),
        SFTConfig(str(folder), **SETTINGS | changes),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        formatting_func=formatting_func,
        data_collator=collator,
    )


def test_the_sfttrainer_sample_of_the_post_trains_as_the_padded_run_did(tmp_path, old_losses):
    tokenizer = tiny_tokenizer()
    response_template_ids = tokenizer.encode("\n ### Answer:", add_special_tokens=False)[2:]
    collator = collator_of(response_template_ids, tokenizer=tokenizer, padding_free=True)
    trainer = trainer_of(tmp_path, collator)
    assert type(trainer.data_collator) is PackedCollator
    steps = [batch["cu_seq_lens_q"].numel() - 1 for batch in trainer.get_train_dataloader()]
    assert steps == [8, 8, 8, 8]  # documents of an optimizer step: those of the padded run
    torch.testing.assert_close(trained_losses(trainer), old_losses, **CLOSE)
    # The control: prompts trained as well make another loss.
    others = trained_losses(trainer_of(tmp_path, collator_of("### Question:")))
    assert all(abs(one - old) > 1e-2 for one, old in zip(others, old_losses, strict=True))


def test_pad_token_eos_as_in_the_post_and_a_template_that_merges_with_its_context(tmp_path):
    tokenizer = merging_tokenizer(pad="<eos>")
    trainer = trainer_of(tmp_path, collator_of("### Answer:", tokenizer=tokenizer))
    assert trainer.processing_class is tokenizer
    assert len(trainer.train_dataset) == len(ROWS)
    for row in trainer.train_dataset:
        *trained, last = [label for label in row["labels"] if label != -100]
        assert last == tokenizer.eos_token_id
        assert row["output"].endswith(tokenizer.decode(trained).strip())
        assert len(tokenizer.decode(trained)) >= len(row["output"]) - 4
    assert len(trained_losses(trainer)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_labels_are_found_before_documents_are_cut(tmp_path, stream):
    """Cut at the start, a document has lost its template, and its answer is still trained."""
    cut = {"max_length": 4, "truncation_mode": "keep_end", "max_steps": 4}
    rows = Dataset.from_list(ROWS)
    rows = rows.to_iterable_dataset() if stream else rows
    trainer = trainer_of(tmp_path, collator_of(ANSWER), rows, **cut)
    labels = torch.cat([batch["labels"][0] for batch in trainer.get_train_dataloader()])
    assert (labels != -100).sum() == 3 * len(ROWS)  # all but the first token of each
