"""Documents in chunks train as whole ones, and the check finds models and faults that do not."""

from contextlib import nullcontext

import pytest
import torch
from harness import make_trainer
from helpers import flash_attn_double
from helpers.distributed.chunks import train
from helpers.distributed.ranks import on_ranks
from helpers.drop_in import trained_losses
from helpers.tiny import documents_of_lengths, tiny_model
from peft import LoraConfig

from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.training.chunks import Chunks, _Behind, cache_name, check_chunks

CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # float32: gradients of chunks are added in another order

TOKENS = torch.arange(3, 43)[None]
BATCH = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(40)[None]}
ROWS = documents_of_lengths([3, 50, 7, 90, 12, 31, 5, 64, 8, 2, 70, 9], prompt=2, seed=0)
for row in ROWS:
    row["loss_weights"] = [token % 7 / 4 for token in row["input_ids"]]
SETTINGS = {"per_device_train_batch_size": 3, "max_length": 128, "max_steps": 3, "logging_steps": 1}
SETTINGS |= {"learning_rate": 0.05, "optim": "sgd", "packing": False, "router_aux_loss_coef": 0.0}

FLASH = "mistral, flash_attention_2"
CASES = {
    "llama": {},
    "llama, packed": {"packing": True, "gradient_checkpointing": True},
    "llama, accumulated": {"gradient_accumulation_steps": 2, "loss_weighting": "document"},
    "llama, LoRA": {"arguments": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}},
    "mistral": {"config": {"sliding_window": 9}},
    FLASH: {"config": {"sliding_window": 9, "attn_implementation": "flash_attention_2"}},
    # AdamW divides by the size of a gradient: where it is 1e-8, by that of its rounding.
    "qwen3": {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-6},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_moe": {},
}


def trained(folder, name, config=None, **settings):
    """Return the losses and the parameters of a run."""
    torch.manual_seed(0)
    model = tiny_model(name.split(",")[0], **(config or {}))
    trainer = make_trainer(folder, ROWS, model, **SETTINGS | settings)
    return trained_losses(trainer), dict(trainer.model.named_parameters())


@pytest.mark.parametrize("name", CASES)
def test_documents_in_chunks_train_as_whole_ones(name, tmp_path, monkeypatch):
    kernel = flash_attn_double.install(monkeypatch) if name == FLASH else None
    whole = trained(tmp_path, name, **CASES[name])
    chunks = trained(tmp_path, name, **CASES[name], max_tokens_in_memory=20)
    torch.testing.assert_close(chunks, whole, **CLOSE)
    assert kernel is None or (20, 40) in {call["longest"] for call in kernel.calls}


@pytest.mark.parametrize("attention", ["documents", "model"])
def test_a_kernel_over_boundaries_keeps_no_mask_of_a_chunk(attention):
    model = tiny_model("llama")
    install_attention(model, resolve_attention(model, attention))
    kept = []

    def loss_of(chunk):
        chunk.pop("labels")
        return model(**chunk).logits.logsumexp(-1).mean()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        Chunks(model, 16, loss_of, torch.Tensor.backward, nullcontext).train(BATCH, 40)
    has_mask = any(x.shape[1:] in ((1, 16, 32), (4, 16, 32)) for x in kept)  # a row, (16, 32)
    assert has_mask == (attention == "model")
    longer = {x.untyped_storage().data_ptr() for x in kept if x.shape in ((32, 2, 8), (40, 2, 8))}
    assert len(longer) == (0 if has_mask else 4)  # keys and values of two layers, no copies


def test_a_backward_may_scale_and_a_chunk_may_have_no_loss():
    """As a GradScaler does, and as the chunks of a long prompt."""
    model = tiny_model("llama")
    whole = model(TOKENS).logits[:, 32:].logsumexp(-1).mean()
    whole.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    def loss_of(chunk):
        is_last = chunk.pop("labels").shape[1] < 16
        logits = model(**chunk).logits
        return logits.logsumexp(-1).mean() if is_last else torch.zeros(())

    loss = Chunks(model, 16, loss_of, lambda x: (8 * x).backward(), nullcontext).train(BATCH, 40)
    found = [parameter.grad / 8 for parameter in model.parameters()]
    torch.testing.assert_close([loss, *found], [whole.detach(), *expected], **CLOSE)


def test_gradients_that_are_not_carried_are_found(tmp_path, monkeypatch):
    whole = trained(tmp_path, "llama")
    cut_off = staticmethod(lambda ctx, of_all, _: (of_all[..., ctx.own, :], None, None, None))
    monkeypatch.setattr(_Behind, "backward", cut_off)
    with pytest.raises(RuntimeError, match=r"gradients of Llama.* in chunks are off by \d+"):
        trained(tmp_path, "llama", max_tokens_in_memory=20)
    monkeypatch.setattr("trl_packing.training.before_training.check_chunks", lambda model: None)
    other = trained(tmp_path, "llama", max_tokens_in_memory=20)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other, whole, **CLOSE)


def test_values_are_kept_in_the_precision_of_the_step(tmp_path, monkeypatch):
    seen = set()
    step = Chunks._step

    def noted(self, chunk, start, cache):
        seen.update(layer.values.dtype for layer in cache.layers)  # rope makes keys float32
        return step(self, chunk, start, cache)

    monkeypatch.setattr("trl_packing.training.before_training.check_chunks", lambda model: None)
    monkeypatch.setattr(Chunks, "_step", noted)
    trained(tmp_path, "llama", max_tokens_in_memory=20, bf16=True, use_cpu=True)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("name", ["lfm2", "falcon_mamba"])
def test_models_with_states_are_refused(name):
    with pytest.raises(RuntimeError, match="max_tokens_in_memory cannot train it; leave it out"):
        check_chunks(tiny_model(name))


def test_a_chunk_draws_the_same_dropout_twice():
    model = tiny_model("llama", attention_dropout=0.3).train()
    compared = []

    def loss_of(chunk):
        layers = chunk[cache_name(model)].layers
        first = [layer.keys[..., :32, :].clone() for layer in layers]
        del chunk["labels"]
        logits = model(**chunk).logits
        compared.extend(map(torch.equal, first, [layer.keys[..., :32, :] for layer in layers]))
        return logits.logsumexp(-1).mean()

    Chunks(model, 16, loss_of, torch.Tensor.backward, torch.enable_grad).train(BATCH, 40)
    assert compared == [True] * 6  # two layers, three chunks


class OwnRows(PackedCollator):
    def __call__(self, documents):
        return dict(super().__call__(documents))


def test_what_chunks_do_not_have_is_refused(tmp_path):
    for settings, words in (
        ({"collator": OwnRows()}, "max_tokens_in_memory=20 divides .* OwnRows changes them"),
        ({"max_tokens_per_micro_batch": 40}, "exclude each other"),
        ({"neftune_noise_alpha": 5.0}, "exclude each other"),
        ({"router_aux_loss_coef": 0.1, "name": "qwen3_moe"}, "router_aux_loss_coef=0.0"),
    ):
        settings = {"name": "llama", "max_tokens_in_memory": 20, **settings}
        with pytest.raises((ValueError, RuntimeError), match=words):
            trained(tmp_path, **settings)


@pytest.mark.slow
def test_two_ranks_train_chunks_as_one_trains_whole_documents(tmp_path):
    """One rank has documents in three chunks, the other has none."""
    case = {"output_dir": str(tmp_path), "max_tokens_in_memory": 12}
    ranks = on_ranks(train, {"chunks": case}, tmp_path / "results")["chunks"]
    alone = train({"output_dir": str(tmp_path), "gradient_accumulation_steps": 2})
    for rank in ranks:
        torch.testing.assert_close(tuple(rank), alone, **CLOSE)
