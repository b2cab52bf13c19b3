"""`make_supervised_dset` turns files of queries and responses into packed rows."""

import json

import pytest
from helpers.prepared import write_rows
from helpers.tiny import tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from trl_packing import enable_packing, make_supervised_dset

TOKENIZER = tiny_tokenizer()
MATH = [{"q": f"What is {i} + {i}?", "a": f"It is {2 * i}."} for i in range(12)]


@pytest.fixture
def math_file(tmp_path):
    return write_rows(tmp_path / "math.jsonl", MATH)


def read(path, q="q", a="a", pack_len=200, **options):
    return make_supervised_dset(TOKENIZER, path, q, a, pack_len=pack_len, **options)


def text_of(documents):
    """(text, what of it is trained) of every document of packed rows."""
    found = []
    for row in documents[:]:
        for number in range(1, int(row["attention_mask"].max()) + 1):
            here = row["attention_mask"] == number
            ids, labels = row["input_ids"][here], row["labels"][here]
            found.append((TOKENIZER.decode(ids), TOKENIZER.decode(labels[labels != -100])))
    return sorted(found)


def test_queries_and_responses_become_packed_rows(math_file):
    dataset = read(math_file, prompt_template="qa")
    assert text_of(dataset) == sorted(
        (f"Question: {row['q']}\nAnswer:\n{row['a']}<eos>", f"{row['a']}<eos>") for row in MATH
    )


def test_columns_and_prompts_of_which_something_is_not_read_are_told(tmp_path, caplog):
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"q": "Why", "a": "So.", "tools": [{"name": "f"}]}) + "\n")
    with caplog.at_level("WARNING"):
        read(str(path), prompt_template="{query} ")
    assert "'tools' beside what is trained" in caplog.text


def test_several_files_have_fields_of_their_own(math_file, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"query": "Why?", "response": "So."}])
    assert len(read([math_file, other], ["q", "query"], ["a", "response"]).lengths) == 13
    with pytest.raises(ValueError, match="2 fields"):
        read([math_file] * 3, ["q", "query"])


def test_without_a_pack_len_documents_stay_documents(math_file):
    documents = read(math_file, pack_len=None)
    assert len(documents) == 12
    assert documents[0]["attention_mask"] == [1] * len(documents[0]["input_ids"])


def test_what_is_cut_is_told(math_file, caplog):
    dataset = read(math_file, pack_len=18, prompt_template="{query} ")
    assert dataset.lengths.max() == 18
    assert "lost" in caplog.text
    with pytest.raises(ValueError, match="18"):
        read(math_file, pack_len=18, overflow="error")


def test_the_four_lines_of_the_page_run(math_file, tmp_path):
    """`monkey_patch4pack` is `enable_packing`, and Trainer calls the tokenizer processing_class."""
    model = tiny_model("llama")
    enable_packing(model)
    options = {"query_field": "q", "resp_field": "a", "prompt_template": "alpaca"}
    rows = make_supervised_dset(tokenizer=TOKENIZER, data_path=math_file, pack_len=200, **options)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    trainer = Trainer(model=model, args=args, processing_class=TOKENIZER, train_dataset=rows)
    assert trainer.train().training_loss > 0
