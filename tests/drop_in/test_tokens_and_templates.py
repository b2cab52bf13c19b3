"""EOS, padding token and chat template are chosen, and reach the model, as in TRL."""

import pytest
from datasets import Dataset
from helpers.drop_in import documents, train_moves_all, trained_text, trainer_for
from helpers.tiny import CHATML, tiny_dataset, tiny_model, tiny_tokenizer


def test_eos_is_added_once(tmp_path):
    rows = [{"text": "with<eos>"}, {"text": "without"}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows))
    assert [trained_text(trainer, i) for i in (0, 1)] == ["with<eos>", "without<eos>"]


def test_tokens_get_no_eos(tmp_path):
    trainer = trainer_for(tmp_path, Dataset.from_list([{"input_ids": [7, 8, 9]}]))
    assert documents(trainer.train_dataset) == [([7, 8, 9], [7, 8, 9])]


@pytest.mark.parametrize(
    ("before", "after"), [([2, 4], [3, 2, 4]), (2, [3, 2]), (None, [3]), ([2, 3], [2, 3])]
)
def test_eos_token_is_mirrored_onto_the_model(tmp_path, before, after):
    model = tiny_model()
    model.generation_config.eos_token_id = before
    trainer = trainer_for(tmp_path, model=model, eos_token="<|im_start|>")
    assert trainer.processing_class.eos_token_id == 3
    assert trainer.model.config.eos_token_id == 3
    assert trainer.model.generation_config.eos_token_id == after
    assert trained_text(trainer, 0).endswith("<|im_start|>")


@pytest.mark.parametrize(("pad", "pad_token_id"), [(None, 2), ("<|other|>", 5)])
def test_pad_token_is_mirrored_onto_the_model(tmp_path, pad, pad_token_id):
    trainer = trainer_for(tmp_path, processing_class=tiny_tokenizer(pad=pad), packing=True)
    assert trainer.processing_class.pad_token_id == pad_token_id
    assert trainer.model.config.pad_token_id == pad_token_id
    assert trainer.model.generation_config.pad_token_id == pad_token_id


@pytest.mark.parametrize("source", ["file", "folder"])
def test_chat_template_path(tmp_path, source):
    if source == "file":
        path = tmp_path / "template.jinja"
        path.write_text(CHATML, encoding="utf-8")
    else:
        path = tmp_path / "other"
        tiny_tokenizer(chat=True).save_pretrained(path)
    trainer = trainer_for(
        tmp_path / "out",
        tiny_dataset("conversational_language_modeling"),
        model=tiny_model("gpt_neox"),
        chat_template_path=str(path),
        save_strategy="steps",
        save_steps=2,
    )
    assert trainer.processing_class.chat_template == CHATML
    train_moves_all(trainer)
    assert (tmp_path / "out/checkpoint-2/chat_template.jinja").read_text(encoding="utf-8") == CHATML
