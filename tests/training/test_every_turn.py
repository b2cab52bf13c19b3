"""A run with `train_on="every_turn"` trains the turns of its conversations as documents."""

import json

import pytest
from datasets import Dataset
from harness import TWO_RUNS, make_trainer
from helpers.combinations import fast
from helpers.distributed.same_steps import Run, assert_same_steps, joined, on_ranks, trained
from helpers.tiny import tiny_tokenizer

from trl_packing.tools.preview.preview import preview_losses, preview_rows
from trl_packing.tools.preview.previewed_run import PreviewedRun

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
    rows = []
    for i in range(number):
        messages = []
        for turn in range(1 + i % 3):
            said = (f"Question {i}, part {turn}?", None), ("So. " * (turn + 1), f"Hm {i}. " * 3)
            for role, (content, thoughts) in zip(("user", "assistant"), said, strict=True):
                messages.append({"role": role, "content": content, "reasoning_content": thoughts})
        rows.append({"messages": messages, "source": "ab"[i % 2]})
    return rows


def by_hand(rows, tokenizer):
    """Return the documents of every turn, tokenized as inference does it."""
    documents = []
    for row in rows:
        messages = [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
        for number in range(1, len(messages), 2):
            prompt = tokenizer.apply_chat_template(
                messages[:number], add_generation_prompt=True, return_dict=False
            )
            thoughts, answer = messages[number]["reasoning_content"], messages[number]["content"]
            turn = tokenizer(f"{thoughts}</think>{answer}<|im_end|>")["input_ids"]
            documents.append(
                {"input_ids": prompt + turn, "labels": [-100] * len(prompt) + turn}
                | {"source": row["source"]}
            )
    return documents


def trainer_for(folder, rows, evaluated=None, tokenizer=None, **settings):
    defaults = {"max_length": 256, "max_steps": 3, "logging_steps": 1}
    defaults |= {"per_device_train_batch_size": 1, "tokenizer": tokenizer or thinking_tokenizer()}
    return make_trainer(folder, rows, evaluated=evaluated, **defaults | settings)


def losses(trainer):
    trainer.train()
    names = ("loss", "grad_norm", "train_loss", "eval_loss", "eval_loss_a", "documents_per_step")
    return [{n: log[n] for n in names if n in log} for log in trainer.state.log_history]


RUNS = {
    "packed": {},
    "workers": {"dataloader_num_workers": 2},
    "padding-free": {"packing": False, "documents_per_step": 5},
    "grouped": {"prefix_sharing": "group", "packing": False, "documents_per_step": 8},
    "evaluated": {
        "loss_weighting": "document",
        "source_column": "source",
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
}


@pytest.mark.parametrize("name", fast(RUNS, ("padding-free", "evaluated")))
def test_a_run_is_that_of_the_documents_of_its_turns(tmp_path, name):
    rows, settings = conversations(), RUNS[name]
    documents = by_hand(rows, thinking_tokenizer())
    evaluated = [None, None]
    if "eval_strategy" in settings:
        evaluated = [Dataset.from_list(rows), Dataset.from_list(documents)]
    turns = trainer_for(tmp_path / "a", rows, evaluated[0], train_on="every_turn", **settings)
    apart = trainer_for(tmp_path / "b", documents, evaluated[1], **settings)
    assert turns.train_dataset["input_ids"][:] == apart.train_dataset["input_ids"][:]
    assert turns.train_dataset["labels"][:] == apart.train_dataset["labels"][:]
    assert losses(turns) == losses(apart)


def test_shared_prefixes_compute_an_answer_once_that_one_document_trains_and_others_read(tmp_path):
    """ChatML keeps answers as they are, so an answer is a prefix of the documents after it."""
    settings = {"packing": False, "documents_per_step": 24, "learning_rate": 0.0, "max_steps": 1}

    def run(sharing):
        tokenizer = tiny_tokenizer(chat=True)
        args = {"train_on": "every_turn", "prefix_sharing": sharing, "tokenizer": tokenizer}
        rows = [
            {"messages": [{k: m[k] for k in ("role", "content")} for m in row["messages"]]}
            for row in conversations()
        ]
        trainer = trainer_for(tmp_path / sharing, rows, **settings, **args)
        trainer.train()
        return trainer.state.log_history

    (apart, whole), (shared, saved) = run("off"), run("bin")
    for name in ("loss", "grad_norm", "entropy"):
        assert shared[name] == pytest.approx(apart[name], rel=TWO_RUNS)
    assert saved["train_documents"] == whole["train_documents"] == 24
    assert saved["train_tokens"] == whole["train_tokens"]
    assert saved["train_computed_tokens"] < 0.7 * whole["train_tokens"]


def test_training_on_the_last_turn_alone_is_another_run(tmp_path):
    rows = conversations()
    settings = {"packing": False, "documents_per_step": 8}
    turns = trainer_for(tmp_path / "a", rows, train_on="every_turn", **settings)
    last = trainer_for(tmp_path / "b", rows, train_on="last_assistant", **settings)
    assert len(turns.train_dataset) == 24
    assert len(last.train_dataset) == 12
    assert losses(turns) != losses(last)


SILENT = {"messages": [{"role": "user", "content": "Hm?"}], "source": "a"}


@pytest.mark.parametrize("shuffles", [False, True])
def test_the_report_counts_conversations_and_those_without_a_turn(tmp_path, shuffles):
    rows = [*conversations(4), SILENT, *conversations(4), SILENT]
    trainer = trainer_for(tmp_path, rows, train_on="every_turn", shuffle_dataset=shuffles)
    trainer.train()
    report = str(trainer.packing_report)
    words = "turns 10 conversations → 14 documents, one for each turn"
    assert words in " ".join(report.split())
    assert "2 documents without a trained token: dropped" in report
    counted = json.loads(trainer.packing_report.to_json())["preparation"]
    assert (counted["conversations"], counted["turns"]) == (10, 14)


def test_a_stream_trains_and_counts_the_same_documents(tmp_path, caplog):
    rows = [*conversations(4), SILENT]
    expected = by_hand(conversations(4), thinking_tokenizer())
    stream = Dataset.from_list(rows).to_iterable_dataset(1)
    trainer = trainer_for(tmp_path, stream, train_on="every_turn", max_steps=1, max_length=4096)
    assert [row["input_ids"] for row in trainer.train_dataset] == [
        row["input_ids"] for row in expected
    ]
    assert set(next(iter(trainer.train_dataset))) == {"input_ids", "labels"}
    trainer.train()
    found = trainer.packing_report.preparation
    assert found.turns == 7 * found.conversations // 5


# --- looking at it before -------------------------------------------------------------------------


def previewed(rows, *options):
    settings = ["--train_on", "every_turn", "--max_length", "4096", *options]
    return PreviewedRun.from_settings(Dataset.from_list(rows), thinking_tokenizer(), settings)


def test_inspect_shows_each_turn_of_a_row():
    run = previewed(conversations(3))
    [shown] = preview_rows(run, [2])
    assert [text.split(" · ")[0] for text in shown.texts] == [
        f"row 2, document {n} of 3" for n in (1, 2, 3)
    ]
    assert shown.texts[0].endswith("<think>⟦Hm 2. Hm 2. Hm 2. </think>So. <|im_end|>⟧")
    assert "3 conversations → 6 documents, one for each turn" in preview_losses(run)


TWO_TURNS = [row for row in conversations(36) if len(row["messages"]) == 4]


@pytest.mark.slow
def test_two_ranks_train_the_turns_that_one_trains(tmp_path):
    data = {"turns": TWO_TURNS, "documents": by_hand(TWO_TURNS, thinking_tokenizer())}
    kinds = {
        "packed": {"packing": True, "per_device_train_batch_size": 1},
        "documents_per_step": {"documents_per_step": 6},
        "stream": {"packing": True, "per_device_train_batch_size": 1, "max_steps": 3},
    }

    def run(name, of, accumulation=1):
        settings = kinds[name] | {"max_length": 256, "gradient_accumulation_steps": accumulation}
        settings |= {"train_on": "every_turn"} if of == "turns" else {}
        options = {"shards": 2 if name == "stream" else None, "chat_template": THINKS}
        folder = str(tmp_path / name / of)
        return Run(folder, "PackedSFTTrainer", data[of], settings=settings, **options)

    runs = {f"{name} {of}": run(name, of) for name in kinds for of in data}
    of_ranks = {name: joined(found) for name, found in on_ranks(runs, tmp_path / "ranks").items()}
    for name in kinds:
        turns, documents = of_ranks[f"{name} turns"], of_ranks[f"{name} documents"]
        assert turns == documents
        assert len(turns["losses"]) > 2
        if name != "stream":  # one rank reads its shards in another order
            assert_same_steps(trained(run(name, "turns", accumulation=2)), turns)
