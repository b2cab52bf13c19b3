"""NEFTune's noise on a document is that of the document alone, whatever it shares a row with.

The tokens of document i all have the id `FIRST + i`, so that noise is told apart by its document:
padded rows repeat a token of their own document where they are padded.
"""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers.tiny import tiny_model, tiny_tokenizer
from peft import LoraConfig, PromptTuningConfig
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedDataset, PackedSFTConfig, PackedSFTTrainer, enable_packing

FIRST, WIDTH, ALPHA = 10, 32, 5.0
LENGTHS = [4, 60, 9, 30, 7, 21, 13, 5]
DOCUMENTS = [{"input_ids": [FIRST + i] * length} for i, length in enumerate(LENGTHS)]
MASKED = [d | {"labels": [-100] * (len(d["input_ids"]) - 1) + [FIRST]} for d in DOCUMENTS]


class Record(TrainerCallback):
    """Records the noise ``(tokens, WIDTH)`` of each document, by mode (training or not)."""

    def __init__(self):
        self.noise = {True: {}, False: {}}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:  # when the isolation check is done
            embeddings = model.get_input_embeddings()
            embeddings.register_forward_hook(self.record)  # behind the one that makes the noise

    def record(self, module, args, output):
        (ids,) = args
        noise = (output - F.embedding(ids, module.weight)).detach()
        for token in ids.unique().tolist():
            found = self.noise[module.training].setdefault(token, [])
            found.append(noise[ids == token])


def arguments(folder, config=PackedSFTConfig, **options):
    return config(
        **{
            "output_dir": str(folder),
            "max_length": 80,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 6,
            "learning_rate": 0.0,
            "neftune_noise_alpha": ALPHA,
            "bf16": False,
            "use_cpu": True,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **options,
        }
    )


def recorded(folder, model=None, trainer=PackedSFTTrainer, documents=DOCUMENTS, **options):
    record = Record()
    peft_config = options.pop("peft_config", None)
    config = SFTConfig if trainer is SFTTrainer else PackedSFTConfig
    trainer(
        model or tiny_model("llama"),
        arguments(folder, config, **options),
        train_dataset=Dataset.from_list(documents),
        eval_dataset=Dataset.from_list(documents) if options.get("eval_strategy") else None,
        processing_class=tiny_tokenizer(),
        callbacks=[record],
        peft_config=peft_config,
    ).train()
    return record.noise


def assert_noise_of_documents_alone(noise, lengths=LENGTHS):
    """Each document: uniform between ± α / √(L · d), by Kolmogorov and Smirnov's distance."""
    for number, length in enumerate(lengths):
        found = torch.cat(noise[FIRST + number]).flatten().double()
        bound = ALPHA / (length * WIDTH) ** 0.5
        n = len(found)
        assert n >= 6 * length * WIDTH  # each of six epochs
        assert found.abs().max() <= bound * (1 + 1e-5)
        expected = (found.sort().values / bound + 1) / 2  # its distribution, if it is uniform
        distance = (expected - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
        assert distance < 2.0 / n**0.5  # by chance once in 1,500 times: the seed is fixed


WAYS = {
    "packed": {},
    "two bins, a multiple": {"per_device_train_batch_size": 2, "pad_to_multiple_of": 64},
    "static shapes": {"static_shapes": True},
    "padding-free": {"packing": False, "per_device_train_batch_size": 3},
    "the model's own attention": {"attention": "model"},
    "explicit mask": {"attention": "mask"},
    "padded rows": {"attention": "padded"},
    "equal lengths": {"attention": "equal_lengths"},
    "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    "LoRA": {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])},
    "virtual tokens": {
        "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    },
    "masked prompts": {"documents": MASKED},
}


FAST = (
    "packed",
    "static shapes",
    "padding-free",
    "padded rows",
    "virtual tokens",
    "masked prompts",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in WAYS]
)
def test_a_document_gets_the_noise_that_it_gets_alone(name, tmp_path):
    assert_noise_of_documents_alone(recorded(tmp_path, **WAYS[name])[True])


def test_trl_gives_that_noise_to_documents_alone(tmp_path):
    alone = {"trainer": SFTTrainer, "per_device_train_batch_size": 1}
    assert_noise_of_documents_alone(recorded(tmp_path, **alone)[True])


@pytest.mark.parametrize("backend", ["documents", "model", "padded"])
def test_plain_trainer_gives_it_too(backend, tmp_path, monkeypatch):
    def run(folder):
        model, record = tiny_model("llama"), Record()
        enable_packing(model, attention=backend)
        args = TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=6,
            learning_rate=0.0,
            neftune_noise_alpha=ALPHA,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        packed = PackedDataset(
            Dataset.from_list([d | {"labels": d["input_ids"]} for d in DOCUMENTS]),
            tiny_tokenizer(),
            80,
        )
        Trainer(model, args, train_dataset=packed, callbacks=[record]).train()
        assert not hasattr(model.get_input_embeddings(), "neftune_noise_alpha")
        return record.noise[True]

    assert_noise_of_documents_alone(run(tmp_path / "scaled"))
    monkeypatch.setattr(
        "trl_packing.plain_trainer.enable.scale_noise_by_document", lambda model: None
    )
    with pytest.raises(AssertionError):
        assert_noise_of_documents_alone(run(tmp_path / "not"))


def test_evaluation_has_no_noise(tmp_path):
    noise = recorded(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4)
    assert all(not x.any() for found in noise[False].values() for x in found)
    assert noise[False].keys() >= {FIRST + i for i in range(len(LENGTHS))}
    assert all(x.any() for found in noise[True].values() for x in found)


def test_noise_of_any_size_leaves_the_isolation_check_alone(tmp_path):
    """A check with noise would call a model with so much of it leaky, or inconclusive."""
    record, model = Record(), tiny_model("llama")
    trainer = PackedSFTTrainer(
        model,
        arguments(tmp_path, neftune_noise_alpha=1e4, max_steps=1, isolation_check="error"),
        train_dataset=Dataset.from_list(DOCUMENTS),
        processing_class=tiny_tokenizer(),
        callbacks=[record],
    )
    trainer.train()
    assert trainer.attention.backend == "documents"
    assert max(x.abs().max() for found in record.noise[True].values() for x in found) > 100
