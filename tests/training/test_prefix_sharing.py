"""A run that shares prefixes is the run that does not: losses, gradients, counts, evaluation."""

import numpy as np
import pytest
import torch
from architectures import tiny_models as architectures
from datasets import Dataset
from harness import TWO_RUNS
from helpers.combinations import fast
from helpers.tiny import tiny_model, tiny_tokenizer
from peft import LoraConfig, get_peft_model

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.packing import tree_row
from trl_packing.packing.collator import DataCollatorWithFlattening
from trl_packing.packing.prefix_tree import PrefixTree
from trl_packing.training.prefix_sharing import PrefixSharing

FAMILIES = fast(["llama", "deepseek_v3", "gemma2"], ("llama",))


@pytest.fixture(autouse=True)
def sharing_is_asked_for(monkeypatch):
    """`prefix_sharing` is what a user set, and not the default, whichever that is."""
    monkeypatch.setattr("trl_packing.config.PackingOptions.prefix_sharing", "off")


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


def train(
    folder,
    model="llama",
    data=None,
    *,
    trainer=PackedSFTTrainer,
    data_collator=None,
    evaluates=True,
    **options,
):
    defaults = {"max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 1}
    options = defaults | {"prefix_sharing": "off"} | options
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
    trainer = trainer(
        tiny_model(model) if isinstance(model, str) else model,
        args,
        data_collator,
        train_dataset=data,
        eval_dataset=data.select(range(15)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    if evaluates:
        trainer.evaluate()
    return trainer


def assert_same(shared, apart, tolerance=TWO_RUNS):
    logs = list(zip(shared.state.log_history, apart.state.log_history, strict=True))
    assert len(logs) > 3
    compared = 0
    for ours, theirs in logs:
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
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
    assert_same(shared, train(tmp_path / "b", model))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_weighting": "sqrt", "gradient_accumulation_steps": 3},
        pytest.param({"documents_per_step": 7}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_step_stays(options, tmp_path, saved):
    shared = train(tmp_path / "a", prefix_sharing="bin", **options)
    assert saved[1] < saved[0]
    assert_same(shared, train(tmp_path / "b", **options))


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
    assert "LEAK" in trainer._isolation.sharing.reason
    assert not trainer.data_collator.shares_prefixes


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param(
            *("mamba", "attention='padded' has one set of boundaries"), marks=pytest.mark.slow
        ),
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
    assert_same(shared, train(tmp_path / "b", data=data))


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


def test_a_step_of_the_user_that_calls_the_model_itself_is_refused(tmp_path):
    """It would compute the loss of a row, in which a shared token counts once."""

    class Own(PackedSFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs = self._prepare_inputs(inputs)
            loss = model(**{k: v for k, v in inputs.items() if "weight" not in k}).loss
            self.accelerator.backward(loss)
            return loss.detach()

    class Timed(PackedSFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch)

    with pytest.raises(RuntimeError, match=r"training_step of Own .*set prefix_sharing='off'"):
        train(tmp_path / "a", trainer=Own, evaluates=False, prefix_sharing="bin")
    assert train(tmp_path / "b", trainer=Timed, prefix_sharing="bin").data_collator.shares_prefixes


def test_noise_for_each_document_is_not_shared(tmp_path):
    """A shared token would get one noise for all documents, as large as that of its segment."""
    noisy = train(tmp_path / "a", prefix_sharing="bin", neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha=5.0 draws noise" in noisy._isolation.sharing.reason
    assert_same(noisy, train(tmp_path / "b", neftune_noise_alpha=5.0), tolerance=0)


@pytest.mark.parametrize("place", ["attention_dropout", "lora_dropout", "jitter"])
def test_dropout_for_each_document_is_not_shared(place, tmp_path):
    """Dropout of a shared token would be the same for all of its documents."""
    model = tiny_model("llama")
    if place == "attention_dropout":
        for module in model.modules():
            if hasattr(module, place):
                setattr(module, place, 0.25)
    elif place == "lora_dropout":
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.25, target_modules=["q_proj"]))
    else:
        model.model.layers[0].mlp.input_jitter_noise = 0.25
    trainer = train(tmp_path, model, prefix_sharing="bin")
    assert "=0.25 draws for each document" in trainer._isolation.sharing.reason
    assert not trainer.data_collator.shares_prefixes
    # evaluation drops nothing
    assert next(iter(trainer.get_eval_dataloader())).get("key_index") is not None


@pytest.mark.parametrize("kind", ["all", "non_padding"])
def test_tokens_seen_are_those_of_the_documents(kind, tmp_path, saved):
    options = {"include_num_input_tokens_seen": kind, "prefix_sharing": "bin"}
    trainer = train(tmp_path, pad_to_multiple_of=32, **options)
    assert saved[1] < 0.8 * saved[0]
    tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    seen = trainer.state.num_input_tokens_seen
    assert seen == tokens if kind == "non_padding" else tokens < seen < 1.3 * tokens


@pytest.mark.parametrize("fails_in", ["training", "evaluation"])
def test_a_check_that_fails_in_one_mode_leaves_the_other_alone(fails_in, tmp_path, monkeypatch):
    """Rows of training must not share after an evaluation for which the check has passed."""
    failure = PrefixSharing._failure

    def failing(self, model, documents, training):
        return (
            "it fails"
            if training == (fails_in == "training")
            else failure(self, model, [], training)
        )

    monkeypatch.setattr(PrefixSharing, "_failure", failing)
    monkeypatch.setattr(PackedSFTTrainer, "_loss_is_ours", lambda self: True)
    rows = {True: [], False: []}

    class Seen(PackedSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            rows[model.training].append("key_index" in inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 1}
    train(tmp_path, trainer=Seen, prefix_sharing="bin", **options)
    assert len(rows[True]) > 4
    assert len(rows[False]) > 4
    assert {any(rows[True]), any(rows[False])} == {True, False}
    assert any(rows[fails_in == "evaluation"])


class OwnRows(PackedCollator):
    """A class of a user, with its own constructor, that masks a token of the last document."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def __call__(self, documents):
        batch = super().__call__(documents)
        batch["labels"][:, -self.masked :] = -100
        return batch


@pytest.mark.parametrize("mode", ["off", "bin"])
def test_rows_that_a_class_of_the_user_changes_are_not_shared(mode, tmp_path, saved):
    options = {"data_collator": OwnRows(masked=1), "isolation_check": "off"}
    trainer = train(tmp_path / "a", prefix_sharing=mode, **options)
    assert saved == [0, 0]
    apart = train(tmp_path / "b", **options)
    assert_same(trainer, apart, tolerance=0)
    if mode == "bin":
        assert "data_collator is your own" in trainer._isolation.sharing.reason


def test_a_class_of_ours_with_another_constructor_shares(tmp_path, saved):
    train(tmp_path, prefix_sharing="bin", data_collator=DataCollatorWithFlattening())
    assert saved[1] < 0.8 * saved[0]


def test_rows_of_a_collator_are_shared_only_where_the_config_asks_for_it(tmp_path):
    with pytest.raises(ValueError, match=r"data_collator has shares_prefixes=True.*'bin'"):
        train(tmp_path, data_collator=PackedCollator(shares_prefixes=True))


def test_a_loss_that_is_set_later_counts_each_document(tmp_path, saved):
    trainer = train(tmp_path, prefix_sharing="bin", evaluates=False)
    shared = list(saved)
    assert shared[1] < shared[0]
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: (
        outputs.logits.square().mean()
    )
    trainer.train()
    assert saved == shared
    assert "the loss is your own" in trainer._isolation.sharing.reason


def test_a_collator_of_the_user_makes_its_own_rows(tmp_path):
    args = PackedSFTConfig(str(tmp_path), prefix_sharing="group", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"prefix_sharing='group', but data_collator is your own"):
        PackedSFTTrainer(
            tiny_model("llama"),
            args,
            train_dataset=documents(),
            data_collator=lambda rows: rows,
            processing_class=tiny_tokenizer(),
        )
