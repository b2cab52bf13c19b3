#!/usr/bin/env bash
# TRL and peft: a run that trains an aLoRA adapter stops at its first evaluation.
#
# TRL turns gradient checkpointing on by default. Under it, peft gives each forward of a model with an aLoRA
# adapter hooks that only a backward removes, also without gradients. The second batch of an evaluation
# set raises. With gradient_checkpointing=False the same run ends.
#
# Seen on 2026-11-27 with torch 2.13.0, transformers 5.24.0, TRL 1.16.0, peft 0.21.2 and accelerate 1.15.0:
#
#     gradient_checkpointing=False: eval_loss 1.411 (the model is random)
#     gradient_checkpointing=True: Multiple invocations of PEFT forward hooks before .backward() with enabled
#         gradient checkpointing. Disable gradient checkpointing or only call forward once per backward.
#
# It exits with 0 if this is seen, and with 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
"$folder/venv/bin/python" -m pip install --quiet \
    transformers==5.24.0 trl==1.16.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
cat > case.py <<'PYTHON'
import sys
import warnings

warnings.filterwarnings("ignore")
import datasets
import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print(*(f"{one.__name__} {one.__version__}" for one in (torch, transformers, trl, peft)))
words = {word: number for number, word in enumerate(["<eos>", "why", "answer", "because"])}
backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
)
datasets.disable_progress_bars()
rows = Dataset.from_list([{"text": "why answer because because"}] * 4)
outcomes = {}
for checkpointing in (False, True):
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config),
        trl.SFTConfig(
            output_dir="out", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
            per_device_eval_batch_size=2, gradient_checkpointing=checkpointing,
            num_train_epochs=1, eval_strategy="epoch", save_strategy="no",
        ),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[2]
        ),
    )
    try:
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        outcomes[checkpointing] = f"eval_loss {losses[0]:.3f}"
    except ValueError as error:
        outcomes[checkpointing] = str(error)
    print(f"gradient_checkpointing={checkpointing}: {outcomes[checkpointing]}")
is_seen = "Multiple invocations" in outcomes[True] and "eval_loss" in outcomes[False]
print("seen" if is_seen else "NOT SEEN: the behavior has changed")
sys.exit(not is_seen)
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" case.py
