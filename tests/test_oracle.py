"""Every model, on every way to the step, with every option, trains its documents as alone.

A row of the table is one optimizer step of `PackedSFTTrainer` on 19 documents with common prefixes,
compared with the same documents one at a time (harness.py). Its negative controls: the comparison
fails for documents that see each other, and for weights that are left out.
"""

from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from harness import Alone, alone, assert_exact, run
from helpers.combinations import fast
from helpers.leaks import OneDocument
from helpers.shared_prefixes import forked_documents
from helpers.tiny import tiny_model
from peft import LoraConfig, get_peft_model

from trl_packing import DataCollatorWithFlattening, PackedCollator

#: What makes a model of its kind hard: windows, caps, sinks, experts, learned positions, states.
MODELS = {
    "llama": "",
    "mistral": "windows",
    "qwen3": "norms of queries and keys",
    "gemma2": "windows, soft-capped scores",
    "gemma3_text": "windows, two ropes; its class ignores loss kwargs",
    "gpt_oss": "sinks, experts, windows",
    "gpt2": "learned positions",
    "qwen3_moe": "experts",
    "deepseek_v3": "latent attention, experts",
    "cohere2": "layers without positions",
    "falcon_mamba": "states",
    "lfm2": "convolutions",
    "nemotron_h": "states and experts",
}
CUT = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
#: The paths from documents to the step; all 19 documents are in it.
WAYS = {
    "one micro-batch": {},
    "accumulated": CUT,
    "padding-free": {"packing": False, "per_device_train_batch_size": 19},
    "padding-free, accumulated": {"packing": False, **CUT, "per_device_train_batch_size": 7},
    "documents_per_step": {"documents_per_step": 19, "per_device_train_batch_size": 3},
    "TRL's truncation": {"packing": False, "max_length": None, "per_device_train_batch_size": 19},
    "a stream": {"max_steps": 1, "per_device_train_batch_size": 12},
    "a worker": {"dataloader_num_workers": 1},
    "first-fit bins": {"packing_strategy": "bfd_split", "overflow": "split"},
    "static shapes": {"static_shapes": True},
    "padded to 64": {"pad_to_multiple_of": 64},
    "padded attention": {"attention": "padded"},
    "masked attention": {"attention": "mask"},
    "checkpointed": {"gradient_checkpointing": True},
    "shared prefixes": {"prefix_sharing": "bin"},
    "shared prefixes, accumulated": {"prefix_sharing": "bin", **CUT},
    "groups of prefixes": {"prefix_sharing": "group", "prefix_group_size": 4},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}
WAYS |= {
    f"{sharing}, {way}": WAYS[way] | WAYS[sharing]
    for sharing, ways in {
        "shared prefixes": ("padding-free", "documents_per_step", "a stream"),
        "groups of prefixes": ("a stream",),
    }.items()
    for way in ways
}
#: What a document or a token counts, and what is trained.
OPTIONS = {
    "plain": {},
    "weights": {},
    "by document": {"loss_weighting": "document"},
    "by square root": {"loss_weighting": "sqrt"},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": 0.1},
    "lora": {},
    "sources": {"source_column": "source"},
}
#: These share no prefixes.
RECURRENT = ("falcon_mamba", "lfm2", "nemotron_h")
#: The others are not compiled here: each takes up to 45 seconds on a slow machine.
COMPILED = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "nemotron_h")
WAYS_OF_RECURRENT = ["padding-free, accumulated", "checkpointed", "static shapes", "compiled"]
SLOW_WAYS = ["compiled", "a worker", "first-fit bins", "masked attention", "groups of prefixes"]
SLOW_WAYS += [way for way in WAYS if "prefixes, " in way and "accumulated" not in way]


def rows():
    """Each model, way and option in a quick row; all pairs of models and ways, slowly."""
    quick = [
        *((model, "accumulated", "weights") for model in MODELS),
        *(("llama", way, "by square root") for way in WAYS if way not in SLOW_WAYS),
        *(("llama", "shared prefixes, accumulated", option) for option in OPTIONS),
        *(("gemma2", "accumulated", option) for option in ("dft", "smoothed", "lora")),
    ]
    others = [
        *((m, w, "weights") for m in MODELS for w in WAYS if m not in RECURRENT),
        *((m, w, "smoothed") for m in RECURRENT for w in WAYS_OF_RECURRENT),
        *(("qwen3_moe", "static shapes", option) for option in OPTIONS),
    ]
    slow = [r for r in dict.fromkeys(others) if r[0] in COMPILED or r[1] != "compiled"]
    slow = [row for row in slow if row not in quick]
    return [*dict.fromkeys(quick), *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]


def build(name, option):
    model = tiny_model(name)
    if option != "lora":
        return model
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def documents_of(option):
    documents = forked_documents(weighted=option not in ("plain", "lora"))
    return [d | {"source": "abc"[at % 3]} for at, d in enumerate(documents)]


def merged(documents):
    """Return one document of all tokens: each sees those before it."""
    return [{k: [x for d in documents for x in d[k]] for k in ("input_ids", "labels")}]


def train(name, way, option, folder, collator=None, **others):
    documents = documents_of(option)
    balance = 0.0 if "moe" in name or name == "gpt_oss" else None  # is a mean of its own
    settings = {"max_length": 128, "router_aux_loss_coef": balance, **WAYS[way], **OPTIONS[option]}
    settings |= {"collator": collator, **others}
    data = Dataset.from_list(documents)
    data = data.to_iterable_dataset() if "a stream" in way else data
    return run(build(name, option), data, folder, **settings), documents


def expected_of(name, option, documents) -> Alone:
    weighting = OPTIONS[option].get("loss_weighting", "token")
    loss = option if option in ("dft", "smoothed") else "nll"
    return alone(build(name, option), documents, loss, weighting)


@pytest.mark.parametrize(("name", "way", "option"), rows())
def test_a_step_trains_its_documents_as_alone(name, way, option, tmp_path):
    found, documents = train(name, way, option, tmp_path)
    backend = found.trainer.attention.backend
    assert (backend == "padded") == (way == "padded attention")
    if "prefixes" in way:
        assert found.trainer.data_collator.shares_prefixes
    assert_exact(found, expected_of(name, option, documents))


@pytest.mark.parametrize("name", fast(("llama", "falcon_mamba"), {"llama"}))
def test_documents_that_see_each_other_or_lose_their_weights_fail_it(name, tmp_path):
    found, documents = train(name, "accumulated", "weights", tmp_path)
    plain = [{key: d[key] for key in ("input_ids", "labels")} for d in documents]
    with pytest.raises(AssertionError):
        assert_exact(found, expected_of(name, "weights", plain))
    ours, _ = train(name, "accumulated", "plain", tmp_path)
    assert_exact(ours, expected_of(name, "plain", plain))
    one_more = plain[0] | {"labels": plain[0]["input_ids"]}
    for fault in (merged(plain), plain[1:], [*plain, plain[0]], [one_more, *plain[1:]]):
        with pytest.raises(AssertionError):
            assert_exact(ours, expected_of(name, "plain", fault))


# --- collators of a user --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_row_that_says_it_is_one_document_fails_it(name, tmp_path):
    found, documents = train(
        name, "accumulated", "plain", tmp_path, collator=OneDocument(), isolation_check="off"
    )
    expected = expected_of(name, "plain", documents)
    assert abs(found.losses[0] - expected[0]) > 20 * expected.bound_of_loss()
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_exact((expected[0], found.gradients), expected)


def test_flattening_by_its_other_name_takes_settings_that_replace_its_fields(tmp_path):
    collator = DataCollatorWithFlattening()
    found, documents = train("llama", "static shapes", "plain", tmp_path, collator=collator)
    assert len({batch["input_ids"].shape for batch in found.batches[0]}) == 1
    assert_exact(found, expected_of("llama", "plain", documents))


class MasksEverySecondTarget(PackedCollator):
    """A class of a user's own that changes which tokens are trained, behind ours."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        batch["labels"][:, ::2] = -100
        return batch


def test_a_user_collator_decides_what_is_trained(tmp_path):
    """The CPU copy of the row, which our collator made before, does not."""
    collator = MasksEverySecondTarget()
    found, documents = train(
        "llama", "accumulated", "plain", tmp_path, collator=collator, isolation_check="off"
    )
    masked = []
    for batch in found.batches[0]:
        ends = batch["cu_seq_lens_q"].tolist()
        ids, labels = (batch[name][0].tolist() for name in ("input_ids", "labels"))
        masked += [{"input_ids": ids[a:b], "labels": labels[a:b]} for a, b in pairwise(ends)]
    assert sorted(d["input_ids"] for d in masked) == sorted(d["input_ids"] for d in documents)
    assert_exact(found, expected_of("llama", "plain", masked))
    with pytest.raises(AssertionError):  # the control
        assert_exact(found, expected_of("llama", "plain", documents))


def test_a_bf16_step_is_as_close_as_bf16_allows(tmp_path):
    """It keeps 8 bits: at most 16 roundings (8 products forward, 8 back) of the largest entry."""
    (loss, gradients), documents = train("llama", "accumulated", "plain", tmp_path, bf16=True)
    expected_loss, expected = expected_of("llama", "plain", documents)
    assert loss == pytest.approx(expected_loss, rel=2**-8)
    for name, reference in expected.items():
        scale = reference.abs().max().item()
        torch.testing.assert_close(gradients[name], reference, rtol=0, atol=16 * 2**-8 * scale)
