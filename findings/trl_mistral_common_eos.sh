#!/usr/bin/env bash
# TRL and transformers: text rows of a tokenizer of mistral-common end in the characters "</s>".
#
# TRL ends rows of text in the text of eos_token. A MistralCommonBackend, which AutoTokenizer returns for
# Mistral's models if mistral-common is installed, makes no special token of any text, by design. So the
# model is trained to write "</", "s", ">" and not to stop, without a message. With mode="finetuning", the
# stop token follows these three.
#
# Seen on 2026-11-27 with torch 2.13.0, transformers 5.24.0, TRL 1.16.0 and mistral-common 1.13.1:
#
#     mode="test" (the default)    The sky is blue </ s >        tokens 1885 1115 1062
#     mode="finetuning"            The sky is blue </ s > </s>   tokens 1885 1115 1062 2
#
# It exits with 0 if this is seen, and with 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
"$folder/venv/bin/python" -m pip install --quiet \
    transformers==5.24.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 mistral-common==1.13.1
cd "$folder"
cat > case.py <<'PYTHON'
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

warnings.filterwarnings("ignore")
import datasets
import mistral_common
import trl
from transformers import LlamaConfig, LlamaForCausalLM, MistralCommonBackend

names = ("torch", "transformers", "trl", "mistral-common")
print(*(f"{name} {version(name)}" for name in names))
datasets.disable_progress_bars()
path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
rows = datasets.Dataset.from_list([{"text": "The sky is blue"}])
ends = {}
for mode in ("test", "finetuning"):
    tokenizer = MistralCommonBackend(str(path), mode=mode)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config),
        trl.SFTConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none"),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    row = trainer.train_dataset[0]
    trained = [number for number in row["labels"] if number != -100]
    ends[mode] = trained[-4:]
    print(f"mode={mode!r}: {tokenizer.convert_ids_to_tokens(trained)} {trained}")
text = tokenizer.encode("</s>", add_special_tokens=False)
print("the text '</s>':", text, "the stop token:", tokenizer.eos_token_id)
is_seen = (
    tokenizer.eos_token_id not in ends["test"]
    and tokenizer.decode(ends["test"]).endswith("</s>")
    and tokenizer.decode(ends["finetuning"]).endswith("</s></s>")
)
print("seen" if is_seen else "NOT SEEN: the behavior has changed")
sys.exit(not is_seen)
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" case.py
