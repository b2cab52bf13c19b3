"""A run takes one path, ours or TRL's, from its constructor on."""

import pytest
import torch
import transformers
from datasets import Dataset
from harness import make_trainer
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer
from trl_packing.attention.calls import use_current_row

ROWS = documents_of_lengths([3 + (i * 7) % 27 for i in range(12)], prompt=1)


class Mixin(SFTTrainer):
    def _prepare_inputs(self, inputs):
        return {"seen": True} | super()._prepare_inputs(inputs)


class Mixed(PackedSFTTrainer, Mixin):
    pass


def test_every_method_that_knows_packed_rows_is_trls_on_trls_path(tmp_path):
    collator = DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer())
    trainer = make_trainer(tmp_path, ROWS, cls=Mixed, collator=collator)
    assert trainer.packing_report is trainer.attention is None
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    prepared = trainer._prepare_inputs(batch)
    assert type(prepared) is dict
    theirs = SFTTrainer._get_train_sampler(trainer, trainer.train_dataset)
    assert type(trainer._get_train_sampler(trainer.train_dataset)) is type(theirs)
    for mixed in (trainer, make_trainer(tmp_path, ROWS, cls=Mixed)):
        assert mixed._prepare_inputs(batch)["seen"], "a class below ours is called on both paths"


def test_without_a_config_a_users_collator_trains_by_trls_defaults(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    # bf16, the default, asks for a GPU that has it
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    rows = Dataset.from_list(ROWS)
    tokenizer = tiny_tokenizer()
    collator = DataCollatorForSeq2Seq(tokenizer=tokenizer)
    options = {"data_collator": collator, "processing_class": tokenizer}
    trainer = PackedSFTTrainer(tiny_model(), train_dataset=rows, **options)
    assert trainer.data_collator is collator
    assert "taking TRL's path unchanged" in caplog.text


@pytest.mark.parametrize("name", ["test", "eval", "train"])
def test_an_evaluation_set_of_any_name_is_packed(tmp_path, name):
    evaluated = {name: Dataset.from_list(ROWS)}
    trainer = make_trainer(tmp_path, ROWS, max_length=32, evaluated=evaluated)
    batch = next(iter(trainer.get_eval_dataloader(name)))
    assert len(batch["cu_seq_lens_q"]) > 2
    assert "cu_seq_lens_q" not in next(iter(trainer.get_test_dataloader(evaluated[name])))


def test_weights_that_a_users_collator_cannot_see_are_refused(tmp_path):
    rows = [{**row, "loss_weight": 0.5} for row in ROWS]
    seen = []

    class Sees(DataCollatorForSeq2Seq):
        def __call__(self, documents):
            seen.extend(documents)
            return super().__call__([{**d} for d in documents])

    options = {"collator": Sees(tokenizer=tiny_tokenizer()), "max_steps": 1}
    with pytest.raises(ValueError, match="loss_weight does nothing on TRL's path"):
        make_trainer(tmp_path, rows, **options)
    make_trainer(tmp_path, rows, remove_unused_columns=False, **options).train()
    assert {document["loss_weight"] for document in seen} == {0.5}


def test_a_stream_that_was_trained_before_is_forgotten(tmp_path, capsys):
    options = {"max_length": 32, "max_steps": 2, "isolation_check": "off"}
    trainer = make_trainer(tmp_path, ROWS, save_strategy="steps", save_steps=2, **options)
    documents = trainer.train_dataset
    for dataset, is_stream in ((documents.to_iterable_dataset(), True), (documents, False)):
        capsys.readouterr()
        trainer.train_dataset = dataset
        trainer.args.output_dir = str(tmp_path / str(is_stream))
        trainer.train()
        place = tmp_path / str(is_stream) / "checkpoint-2" / "stream_0.json"
        assert place.exists() == is_stream
    assert capsys.readouterr().out.count(" trl_packing ") == 1  # a stream's has a second one


def test_a_batch_that_is_prepared_by_hand_leaves_no_current_row(tmp_path):
    trainer = make_trainer(tmp_path, ROWS, max_length=32, max_steps=1)
    trainer.train()  # the model then knows packed calls
    batch = trainer.data_collator(ROWS[:3])
    other = torch.tensor([[5, 6, 7, 8]])
    trainer._prepare_inputs(batch)
    assert trainer.model(input_ids=other).logits.isfinite().all()
    with use_current_row(batch), pytest.raises(ValueError, match="row"):  # the control
        trainer.model(input_ids=other)
