"""A run with `train_on="every_turn"` trains the turns of its conversations as documents."""

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.prepared import chats
from helpers.tiny import tiny_tokenizer

# The prompt opens thoughts, and those of earlier turns are dropped.
THINKS = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endif %}{{ m.content }}\
<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}\
{% endif %}"""


def thinking_tokenizer():
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = THINKS
    return tokenizer


def conversations(number=12):
    rows = chats(number, sources=True).to_list()
    for row in rows:
        for message in row["messages"][1::2]:
            message["reasoning_content"] = f"Hm, {message['content']}" * 3
    return rows


def by_hand(rows):
    """Return the documents of every turn, tokenized as inference does it."""
    tokenizer = thinking_tokenizer()
    documents = []
    for row in rows:
        for number in range(1, len(row["messages"]), 2):
            prompt = tokenizer.apply_chat_template(
                row["messages"][:number], add_generation_prompt=True, return_dict=False
            )
            said = row["messages"][number]
            turn = tokenizer(f"{said['reasoning_content']}</think>{said['content']}<|im_end|>")
            labels = [-100] * len(prompt) + turn["input_ids"]
            made = {"input_ids": prompt + turn["input_ids"], "labels": labels}
            documents.append(made | {"source": row["source"]})
    return documents


def trainer_for(folder, rows, evaluated=None, tokenizer=None, **settings):
    defaults = {"max_length": 256, "max_steps": 3, "logging_steps": 1}
    defaults |= {"per_device_train_batch_size": 1, "tokenizer": tokenizer or thinking_tokenizer()}
    return make_trainer(folder, rows, evaluated=evaluated, **defaults | settings)


def losses(trainer):
    trainer.train()
    names = ("loss", "grad_norm", "train_loss", "eval_loss", "eval_loss_a", "documents_per_step")
    return [{n: log[n] for n in names if n in log} for log in trainer.state.log_history]


EVALUATED = {"source_column": "source", "eval_strategy": "steps", "eval_steps": 1}
RUNS = {
    "padding-free": {"packing": False, "documents_per_step": 5},
    "evaluated": EVALUATED | {"loss_weighting": "document"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_the_documents_of_its_turns(tmp_path, name):
    rows = conversations()
    settings = RUNS[name]
    documents = by_hand(rows)
    sets = map(Dataset.from_list, (rows, documents)) if name == "evaluated" else (None, None)
    of_turns, of_documents = sets
    turns = trainer_for(tmp_path / "a", rows, of_turns, train_on="every_turn", **settings)
    apart = trainer_for(tmp_path / "b", documents, of_documents, **settings)
    assert turns.train_dataset["input_ids"][:] == apart.train_dataset["input_ids"][:]
    assert turns.train_dataset["labels"][:] == apart.train_dataset["labels"][:]
    assert losses(turns) == losses(apart)
    if name == "padding-free":  # the control
        last = trainer_for(tmp_path / "c", rows, train_on="last_assistant", **settings)
        assert losses(last) != losses(turns)


SILENT = {"messages": [{"role": "user", "content": "Hm?"}], "source": "a"}


def test_the_report_counts_conversations_and_those_without_a_turn(tmp_path):
    rows = [*conversations(4), SILENT, *conversations(4), SILENT]
    trainer = trainer_for(tmp_path, rows, train_on="every_turn", shuffle_dataset=True)
    report = " ".join(str(trainer.packing_report).split())
    assert "turns 10 conversations → 14 documents, one for each turn" in report
    assert "2 documents without a trained token: dropped" in report


def test_a_stream_trains_and_counts_the_same_documents(tmp_path):
    stream = Dataset.from_list([*conversations(4), SILENT]).to_iterable_dataset(1)
    trainer = trainer_for(tmp_path, stream, train_on="every_turn", max_steps=1, max_length=4096)
    found = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert found == [(d["input_ids"], d["labels"]) for d in by_hand(conversations(4))]
    trainer.train()
    counted = trainer.packing_report.preparation
    assert counted.turns == 7 * counted.conversations // 5
