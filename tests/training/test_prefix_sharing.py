"""A run that shares prefixes is the run that does not: losses, gradients, counts, evaluation."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.tiny import tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.packing import tree_row
from trl_packing.packing.prefix_tree import PrefixTree
from trl_packing.tools.exactness import tiny_models as architectures

FAST = ["llama", "deepseek_v3"]
SLOW = ["qwen3", "gemma2", "gemma3_text", "mistral", "cohere2"]
FAMILIES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def documents(number=40, *, shared=True):
    rng = np.random.default_rng(0)
    size = len(tiny_tokenizer())
    prompts = [rng.integers(6, size, 40) for _ in range(4)]
    rows = []
    for i in range(number):
        prompt = prompts[i % 4][: rng.integers(20, 40)] if shared else rng.integers(6, size, 30)
        answer = rng.integers(6, size, rng.integers(2, 20)).tolist()
        rows.append(
            {"input_ids": [*prompt.tolist(), *answer], "labels": [-100] * len(prompt) + answer}
        )
    return Dataset.from_list(rows)


def train(folder, model="llama", data=None, **options):
    options = {"max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 1} | options
    args = PackedSFTConfig(
        str(folder),
        logging_steps=1,
        learning_rate=0.0,  # so that every step compares gradients of the same weights
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    data = documents() if data is None else data
    trainer = PackedSFTTrainer(
        tiny_model(model) if isinstance(model, str) else model,
        args,
        train_dataset=data,
        eval_dataset=data.select(range(15)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def assert_same(shared, apart, tolerance=2e-6):
    logs = list(zip(shared.state.log_history, apart.state.log_history, strict=True))
    assert len(logs) > 3
    compared = 0
    for ours, theirs in logs:
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-6), name
                compared += 1
        for name in ("documents_per_step", "num_tokens", "train_documents", "train_tokens"):
            assert ours.get(name) == theirs.get(name)
    assert compared > 10


@pytest.fixture
def saved(monkeypatch):
    """Return [tokens of documents, tokens computed] of all rows that share."""
    counts, make = [0, 0], tree_row.build_prefix_tree

    def counted(ids, **options):
        tree = make(ids, **options)
        counts[0] += sum(map(len, ids))
        counts[1] += int(tree.starts[-1])
        return tree

    monkeypatch.setattr(tree_row, "build_prefix_tree", counted)
    return counts


@pytest.mark.parametrize("model", FAMILIES)
def test_losses_gradients_and_counts_stay(model, tmp_path, saved):
    shared = train(tmp_path / "a", model, prefix_sharing="bin")
    assert saved[1] < 0.8 * saved[0], "nothing was shared"
    assert_same(shared, train(tmp_path / "b", model), tolerance=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_weighting": "sqrt", "gradient_accumulation_steps": 3},
        {"documents_per_step": 7},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"loss_weighting": "document"},
                {"packing": False, "per_device_train_batch_size": 6},
                {"label_smoothing_factor": 0.1},
                {"loss_type": "dft"},
                {"pad_to_multiple_of": 32},
            )
        ),
    ],
    ids=str,
)
def test_every_kind_of_step_stays(options, tmp_path, saved):
    shared = train(tmp_path / "a", prefix_sharing="bin", **options)
    assert saved[1] < saved[0]
    assert_same(shared, train(tmp_path / "b", **options), tolerance=1e-5)


def test_siblings_that_see_each_other_would_be_found(tmp_path, monkeypatch):
    """The control: keys of a chain instead of a tree change the loss, and the check refuses it."""

    def chain(tree):
        ends = tree.cu_seqlens[1:].astype(np.int64)
        keys = np.concatenate([np.arange(end) for end in ends])
        return np.cumsum([0, *ends]).astype(np.int32), keys

    make = tree_row.build_prefix_tree

    def leaking(ids, **options):
        tree = make(ids, **options)
        cu_seqlens_k, key_index = chain(tree)
        return PrefixTree(**{**vars(tree), "cu_seqlens_k": cu_seqlens_k, "key_index": key_index})

    monkeypatch.setattr(tree_row, "build_prefix_tree", leaking)
    trainer = train(tmp_path, prefix_sharing="bin")
    assert "LEAK" in trainer._loaders.sharing.reason
    assert not trainer.data_collator.shares_prefixes


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "attention='padded' has one set of boundaries"),
        ("bloom", "attention='padded' has one set of boundaries"),
    ],
)
def test_models_that_cannot_share_train_as_without(name, reason, tmp_path, caplog):
    def model():
        torch.manual_seed(0)
        made = architectures.tiny_model(name)
        made.resize_token_embeddings(len(tiny_tokenizer()))
        return made

    shared = train(tmp_path / "a", model(), prefix_sharing="bin")
    assert "prefix_sharing='bin' does nothing in this run: " in caplog.text
    assert reason in caplog.text
    assert_same(shared, train(tmp_path / "b", model()))


def test_documents_without_common_prefixes_train_on_the_same_rows(tmp_path):
    data = documents(shared=False)
    shared = train(tmp_path / "a", data=data, prefix_sharing="bin")
    assert_same(shared, train(tmp_path / "b", data=data), tolerance=1e-6)


def test_a_loss_of_the_user_counts_each_document(tmp_path, caplog):
    class Own(PackedSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = PackedSFTConfig(
        str(tmp_path), prefix_sharing="bin", max_length=128, use_cpu=True, bf16=False, max_steps=1
    )
    data = documents()
    Own(tiny_model("llama"), args, train_dataset=data, processing_class=tiny_tokenizer()).train()
    assert "the loss is your own" in caplog.text


def test_a_collator_of_the_user_makes_its_own_rows(tmp_path):
    args = PackedSFTConfig(str(tmp_path), prefix_sharing="bin", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"prefix_sharing='bin', but data_collator is your own"):
        PackedSFTTrainer(
            tiny_model("llama"),
            args,
            train_dataset=documents(),
            data_collator=lambda rows: rows,
            processing_class=tiny_tokenizer(),
        )
