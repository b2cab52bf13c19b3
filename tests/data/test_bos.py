"""Documents that begin with two BOS tokens are counted and named."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, concatenate_datasets
from helpers.tiny import tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.data.stop_tokens import note_second_bos
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import TOKEN_COLUMNS

BOS = 1
ROWS = [[BOS, BOS, 7], [BOS, 7, BOS], [BOS], [7, BOS, BOS], [BOS, BOS]]


def documents(rows: list[list[int]]) -> Dataset:
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 4, 2, 0, 3], [1, 2, 3]])
def test_documents_are_counted_in_chunks_and_selections(order):
    stored = concatenate_datasets([documents(ROWS[:3]), documents(ROWS[3:])]).select(order)
    tokenizer = SimpleNamespace(bos_token_id=BOS, bos_token="<s>")
    note = note_second_bos(ArrowDocuments(stored, TOKEN_COLUMNS), tokenizer, "train")
    twice = [number for number, row in enumerate(order) if ROWS[row][:2] == [BOS, BOS]]
    if not twice:
        assert note is None
        return
    assert f"{len(twice)} of {len(order)} documents" in note
    assert f"'<s>'; the first is document {twice[0]})" in note


def test_a_tokenizer_without_bos_is_asked_nothing():
    held = ArrowDocuments(documents(ROWS), TOKEN_COLUMNS)
    assert note_second_bos(held, SimpleNamespace(bos_token_id=None), "train") is None


def test_a_run_on_rendered_text_says_so(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.add_bos_token = "<|im_start|>", True
    assert tokenizer("A")["input_ids"][0] == tokenizer.bos_token_id

    def notes(text: str) -> str:
        trainer = PackedSFTTrainer(
            tiny_model("llama"),
            PackedSFTConfig(tmp_path, use_cpu=True, bf16=False, report_to="none"),
            train_dataset=Dataset.from_dict({"text": [text, text]}),
            processing_class=tokenizer,
        )
        return str(trainer.packing_report)

    sentence = "2 of 2 documents begin with two BOS tokens"
    assert sentence in " ".join(notes("<|im_start|>user A").split())
    assert sentence not in " ".join(notes("user A").split())
