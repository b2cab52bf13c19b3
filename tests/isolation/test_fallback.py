"""With every attention backend, a packed step is the same documents one at a time.

The reference is `one_at_a_time`: each document alone through a fresh copy of the untouched model.
Tolerance, float32: a pass rounds at 2**-24 = 6e-8 of a value; backends that sum in another order
stay below 100 roundings, so 1e-5 of the largest value. Leaks are 2 to 5 orders of magnitude larger.
"""

import copy
import logging
from functools import cache

import peft
import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_models import tiny_model
from architectures.tiny_step import (
    StepResult,
    one_at_a_time,
    packed_step,
    tiny_documents,
)
from datasets import Dataset
from helpers.leaks import hopeless
from helpers.tiny import tiny_tokenizer

import trl_packing.attention.backends
import trl_packing.isolation.guard
from trl_packing import (
    PackedCollator,
    PackedSFTConfig,
    PackedSFTTrainer,
    block_diagonal_mask,
    resolve_attention,
)
from trl_packing.attention import block_mask
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention
from trl_packing.isolation.guard import with_fallbacks

TOLERANCE = 1e-5
LEAK = 100 * TOLERANCE  # the least that a leak moves logits, loss and gradients here

WAYS = ["documents", "model", "mask", "padded", "equal_lengths"]


@cache
def truth(name: str) -> StepResult:
    return one_at_a_time(tiny_model(name), tiny_documents())


def step(name, folder, **options):
    return packed_step(tiny_model(name), tiny_documents(), str(folder), **options)


def assert_exact(packed, expected):
    for what, error in zip(("logits", "loss", "gradients"), packed.distance(expected), strict=True):
        assert error <= TOLERANCE, what


def trainer_for(model, folder, *, cls=PackedSFTTrainer, documents=None, arguments=None, **options):
    documents = tiny_documents() if documents is None else documents
    settings = {
        "output_dir": str(folder),
        "max_length": 80,
        "max_steps": 1,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "per_device_eval_batch_size": 2,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(
        model,
        PackedSFTConfig(**settings | options),
        train_dataset=Dataset.from_list(documents),
        processing_class=tiny_tokenizer(),
        **(arguments or {}),
    )


# --- each way is exact --------------------------------------------------------------------------

NAMED = [
    *[("llama", way) for way in WAYS],
    *[(name, way) for name in ("gemma2", "mistral") for way in ("mask", "padded")],
    *[(name, "padded") for name in ("mixtral", "qwen3_moe")],
]

AUTOMATIC = {
    "llama": "documents",
    "opt": "documents",
    "bert": "documents",  # its head is more than a matrix
    "falcon": "mask",
    "falcon+alibi": "padded",
    "bloom": "padded",
    "bart": "padded",
    "mamba": "padded",
    "jamba": "padded",
    "zamba2": "padded",
    "recurrent_gemma": "padded",
    "phi3+longrope": "padded",
    "llama+dynamic": "equal_lengths",  # its frequencies follow the longest row of a forward
}

LEAKS_ON_ITS_OWN = ["bart", "bloom", "falcon", "jamba", "mamba", "opt", "phi3+longrope"]


@pytest.mark.parametrize(("name", "way"), NAMED)
def test_a_named_way_trains_what_one_document_at_a_time_would(name, way, tmp_path):
    used, packed = step(name, tmp_path, attention=way)
    assert used.backend == way
    assert_exact(packed, truth(name))


# Some models compute token by token, and their whole runs take seconds.
LONG = ("jamba", "recurrent_gemma", "zamba2")


def slow_if_long(names):
    """Return parameters of a test, those of long runs among the slow ones."""
    return [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in names]


@pytest.mark.parametrize("name", slow_if_long(AUTOMATIC))
def test_the_way_that_is_found_trains_what_one_document_at_a_time_would(name, tmp_path):
    used, packed = step(name, tmp_path)
    assert used.backend == AUTOMATIC[name], used.reason
    assert_exact(packed, truth(name))


@pytest.mark.parametrize("name", slow_if_long(["bloom", "falcon", "recurrent_gemma"]))
def test_gradient_checkpointing_runs_every_forward_again_as_it_was(name, tmp_path):
    used, packed = step(name, tmp_path, gradient_checkpointing=True)
    assert used.backend == AUTOMATIC[name]
    assert_exact(packed, truth(name))


@pytest.mark.parametrize("name", slow_if_long(["bert", "bloom", "falcon", "recurrent_gemma"]))
def test_a_bf16_run_takes_the_same_way(name, tmp_path):
    """accelerate's autocast is around the model by the time that a way is installed."""
    used, packed = step(name, tmp_path, bf16=True)
    assert used.backend == AUTOMATIC[name], used.reason
    assert packed.loss == pytest.approx(truth(name).loss, rel=2**-8)


@pytest.mark.parametrize("name", slow_if_long(LEAKS_ON_ITS_OWN))
def test_a_leaking_model_fails_the_same_comparison(name, tmp_path):
    """Packed by position_ids alone, as packing without a check would."""
    _, packed = step(name, tmp_path, attention="model", isolation_check="off")
    assert min(packed.distance(truth(name))) > LEAK


def test_a_mask_without_the_window_fails_the_same_comparison(tmp_path, monkeypatch):
    def without_window(seq_lengths, config, dtype, *_):
        return block_diagonal_mask(torch.from_numpy(seq_lengths)[None], dtype=dtype)

    monkeypatch.setattr(block_mask, "packed_mask", without_window)
    _, packed = step("mistral", tmp_path, attention="mask", isolation_check="off")
    assert min(packed.distance(truth("mistral"))) > LEAK


def test_padded_rows_across_a_threshold_of_rope_fail_the_same_comparison(tmp_path, monkeypatch):
    model, documents = tiny_model("phi3+longrope"), tiny_documents((34, 31, 12))  # 32 is between
    expected = one_at_a_time(model, documents)
    options = {"attention": "padded", "isolation_check": "off"}
    _, apart = packed_step(copy.deepcopy(model), documents, str(tmp_path), **options)
    assert_exact(apart, expected)
    monkeypatch.setattr(trl_packing.attention.install, "rope_thresholds", lambda model: [])
    _, together = packed_step(copy.deepcopy(model), documents, str(tmp_path), **options)
    assert min(together.distance(expected)) > LEAK


# --- which way, and why -------------------------------------------------------------------------


def test_ways_are_tried_from_fast_to_slow():
    def order(name):
        return [way.backend for way in with_fallbacks(resolve_attention(tiny_model(name)))]

    assert order("llama") == WAYS
    assert order("bloom") == WAYS[1:]
    assert [way.backend for way in with_fallbacks(AttentionChoice("padded", None, ""))] == WAYS[3:]


def test_a_refusal_is_a_reason_too(tmp_path):
    used, _ = step("bloom", tmp_path)
    leak, refusal = used.reason.split("; ")
    assert leak.startswith("model leaks by ")
    assert refusal.startswith("mask refused (ValueError: ")
    assert "\n" not in str(used)


@pytest.mark.parametrize(
    ("name", "way"),
    [("bloom", "model"), ("mamba", "documents"), ("bart", "mask"), ("llama+dynamic", "padded")],
)
def test_a_named_way_that_leaks_stops_before_the_first_step(name, way, tmp_path):
    run = trainer_for(tiny_model(name), tmp_path, attention=way)
    before = copy.deepcopy(run.model.state_dict())
    expected = rf"LEAK.*{type(run.model).__name__}, .*attention='{way}'.*training mode"
    with pytest.raises(RuntimeError, match=expected):
        run.train()
    assert run.attention.backend == way
    torch.testing.assert_close(run.model.state_dict(), before, rtol=0, atol=0)


def test_a_named_way_that_cannot_run_stops_before_the_first_step(tmp_path):
    run = trainer_for(tiny_model("bloom"), tmp_path, attention="mask")
    expected = r"BloomForCausalLM cannot run packed documents by .*ValueError.*attention='padded'"
    with pytest.raises(RuntimeError, match=expected):
        run.train()


def test_where_no_way_is_exact_the_first_one_is_left_and_the_run_stops(tmp_path):
    run = trainer_for(hopeless(), tmp_path)
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, document-wise SDPA"):
        run.train()
    assert run.attention.backend == "documents"
    assert run.model.config._attn_implementation == "sdpa", "as it came"


def test_where_nobody_asked_for_packing_rows_are_padded_as_in_trl(tmp_path, caplog):
    run = trainer_for(hopeless(), tmp_path, packing=False, per_device_train_batch_size=4)
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        run.train()
    assert run.state.global_step == 1
    assert run.attention.backend == "padded"
    assert "rows are padded, as in TRL" in caplog.text


def test_evaluation_on_longer_documents_goes_on_by_a_slower_way(tmp_path):
    run = trainer_for(
        tiny_model("phi3+longrope"), tmp_path, documents=tiny_documents((5, 12, 20, 30))
    )
    run.train()
    assert run.attention.backend == "documents"
    longer = tiny_documents((10, 40, 25, 70))
    expected = one_at_a_time(run.model, longer).loss
    loss = run.evaluate(Dataset.from_list(longer))["eval_loss"]
    assert run.attention.backend == "padded"
    assert loss == pytest.approx(expected, rel=TOLERANCE)


# --- adapters -----------------------------------------------------------------------------------

ADAPTERS = {
    "LoRA": peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "DoRA": peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True
    ),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "a trained head": peft.LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    ),
    "trained tokens": peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        init_lora_weights=False,
        trainable_token_indices=list(range(10, 60)),
    ),
}
VIRTUAL_TOKENS = {
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32),
}


def adapted(config):
    config = copy.deepcopy(config)
    config.task_type = "CAUSAL_LM"
    return peft.get_peft_model(tiny_model("llama"), config)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_train_packed_as_one_document_at_a_time(kind, tmp_path):
    model = adapted(ADAPTERS[kind])
    expected = one_at_a_time(model, tiny_documents())
    used, packed = packed_step(model, tiny_documents(), str(tmp_path))
    assert used.backend == "documents"
    assert_exact(packed, expected)


def behind_virtual_tokens(model):
    """Return what `one_at_a_time` would, of a model whose logits may begin with virtual tokens."""
    model = copy.deepcopy(model).train()
    documents = tiny_documents()
    num_trained = sum(label != -100 for d in documents for label in d["labels"][1:])
    logits, loss = [], 0.0
    for document in documents:
        ids, labels = (torch.tensor(document[key])[None] for key in ("input_ids", "labels"))
        output = model(input_ids=ids, use_cache=False).logits[0, -ids.shape[1] :]
        nll = F.cross_entropy(output[:-1], labels[0, 1:], reduction="sum") / num_trained
        nll.backward()
        logits.append(output.detach())
        loss += nll.item()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return StepResult(torch.cat(logits), loss, gradients)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", VIRTUAL_TOKENS)
def test_virtual_tokens_train_on_padded_rows_as_one_document_at_a_time(kind, bf16, tmp_path):
    model = adapted(VIRTUAL_TOKENS[kind])
    expected = behind_virtual_tokens(model)
    documents = tiny_documents()
    used, packed = packed_step(copy.deepcopy(model), documents, str(tmp_path), bf16=bf16)
    assert used.backend == "padded", used.reason
    if bf16:
        assert packed.loss == pytest.approx(expected.loss, rel=2**-8)
    else:
        assert_exact(packed, expected)


# --- the model is left what it was --------------------------------------------------------------

INSTALLED = [*[("llama", way) for way in WAYS], ("falcon", "mask"), ("mamba", "padded")]


def installed(name, way, seed=0):
    model = tiny_model(name, seed).eval()
    install_attention(model, resolve_attention(model, way))
    return model


def packed_batch():
    batch = PackedCollator()(tiny_documents())
    batch.pop("labels")
    return batch


@torch.no_grad()
def unpacked_outputs(model):
    """Return logits of a row, of batches padded on either side, and what `generate` writes."""
    ids = torch.arange(20, 50).reshape(3, 10)
    right = torch.arange(10) < torch.tensor([[10], [4], [7]])
    batches = [{"input_ids": ids}]
    batches += [
        {"input_ids": ids, "attention_mask": mask.long()} for mask in (right, right.flip(1))
    ]
    logits = [model(**batch, use_cache=False).logits for batch in batches]
    written = [model.generate(**batch, max_new_tokens=6, do_sample=False) for batch in batches]
    return logits, written


@pytest.mark.parametrize(("name", "way"), INSTALLED)
def test_calls_that_are_not_packed_stay_as_they_were_to_the_last_bit(name, way):
    expected = unpacked_outputs(tiny_model(name).eval())
    model = installed(name, way)
    torch.testing.assert_close(unpacked_outputs(model), expected, rtol=0, atol=0)
    with torch.no_grad():
        model(**packed_batch())
    torch.testing.assert_close(unpacked_outputs(model), expected, rtol=0, atol=0)
