"""`make_supervised_dset` turns files of queries and responses into packed rows."""

import json

import pytest
from helpers.plain_runs import (
    MATH,
)
from helpers.tiny import tiny_model, tiny_tokenizer
from transformers import (
    Trainer,
    TrainingArguments,
)

from trl_packing import (
    PackedDataset,
    enable_packing,
    make_supervised_dset,
)


@pytest.fixture
def math_file(tmp_path):
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MATH))
    return str(path)


def text_of(documents, tokenizer):
    """(text, what of it is trained) of every document of packed rows."""
    found = []
    for row in documents[:]:
        for number in range(1, int(row["attention_mask"].max()) + 1):
            here = row["attention_mask"] == number
            ids, labels = row["input_ids"][here], row["labels"][here]
            found.append((tokenizer.decode(ids), tokenizer.decode(labels[labels != -100])))
    return sorted(found)


def test_queries_and_responses_become_packed_rows(math_file):
    tokenizer = tiny_tokenizer()
    dataset = make_supervised_dset(
        tokenizer, math_file, "q", "a", pack_len=200, prompt_template="qa"
    )
    assert isinstance(dataset, PackedDataset)
    assert text_of(dataset, tokenizer) == sorted(
        (f"Question: {row['q']}\nAnswer:\n{row['a']}<eos>", f"{row['a']}<eos>") for row in MATH
    )


def test_templates_of_dart_math_are_read(math_file, tmp_path):
    parts = {"sys_prompt": "Be {brief}.\n", "query_prompt": "User:\n"}
    parts |= {"prompt_after_query": "\n\n", "resp_prompt": "Assistant:\n"}
    path, tokenizer = tmp_path / "own.json", tiny_tokenizer()
    path.write_text(json.dumps(parts))
    for template in (parts, str(path)):
        dataset = make_supervised_dset(
            tokenizer, math_file, "q", "a", pack_len=200, prompt_template=template
        )
        expected = "Be {brief}.\nUser:\nWhat is 0 + 0?\n\nAssistant:It is 0."
        assert text_of(dataset, tokenizer)[0][0].startswith(expected)


def test_several_files_have_fields_of_their_own(math_file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"query": "Why?", "response": "So."}) + "\n")
    tokenizer = tiny_tokenizer()
    dataset = make_supervised_dset(
        tokenizer, [math_file, str(other)], ["q", "query"], ["a", "response"], pack_len=300
    )
    assert len(dataset.lengths) == 13
    with pytest.raises(ValueError, match="2 fields"):
        make_supervised_dset(tokenizer, [math_file] * 3, ["q", "query"])


def test_without_a_pack_len_documents_stay_documents(math_file):
    documents = make_supervised_dset(tiny_tokenizer(), math_file, "q", "a", pack_len=None)
    assert len(documents) == 12
    assert documents[0]["attention_mask"] == [1] * len(documents[0]["input_ids"])


def test_what_is_cut_is_told(math_file, caplog):
    with caplog.at_level("WARNING", "trl_packing.plain_trainer.dataset"):
        dataset = make_supervised_dset(
            tiny_tokenizer(), math_file, "q", "a", pack_len=18, prompt_template="{query} "
        )
    assert dataset.lengths.max() == 18
    assert "lost" in caplog.text
    with pytest.raises(ValueError, match="18"):
        make_supervised_dset(tiny_tokenizer(), math_file, "q", "a", pack_len=18, overflow="error")


def test_the_four_lines_of_the_page_run(math_file, tmp_path):
    """`monkey_patch4pack` is `enable_packing`, and Trainer calls the tokenizer processing_class."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    enable_packing(model)
    options = {"query_field": "q", "resp_field": "a", "prompt_template": "alpaca"}
    rows = make_supervised_dset(tokenizer=tokenizer, data_path=math_file, pack_len=200, **options)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    trainer = Trainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
    assert trainer.train().training_loss > 0
