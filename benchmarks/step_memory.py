"""Peak memory of a training step on a CPU: TRL padded, TRL packed, and this package.

    python benchmarks/step_memory.py --output benchmarks/results/step_memory.md   # about 30 minutes

A Llama of 4 layers × 512 hidden trains two steps of about T tokens, in float32: a packed row of
documents of 256 tokens on average, or as many documents as a padded batch. Each run has a process
of its own. MiB are the largest resident set, beyond that before the first step, so weights are not
in it; gradients and AdamW's states are.

Held are gradients, AdamW's two states, and the activations that the backward reads: those that
autograd saves in a forward of the backbone by this package, each storage once. What a run takes
beyond that are logits, masks, scores, copies, and pages that the allocator keeps.
"""

import argparse
import tempfile
import warnings
from typing import Any

import chunks
import step
from helpers.saved import kept_by_autograd
from machine import ON_CPU, in_process, provenance, publish, table
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedCollator, PackedSFTTrainer, resolve_attention
from trl_packing.attention.calls import use_current_row
from trl_packing.attention.install import install_attention
from trl_packing.documents.host_row import for_kernels

LENGTHS = (2048, 8192, 32768)
VOCABULARIES = (32_000, 128_000)
WAYS = {"TRL padded": SFTTrainer, "TRL packed": SFTTrainer, "here": PackedSFTTrainer}
# At 32,768 tokens, TRL's packed rows have scores of T × T in 8 heads, float32, 32 GiB a layer, and
# 128 padded documents take four times the memory of 32: neither fits in 24 GB.
MOST_TOKENS_OF_TRL = 8192


def measure(way: str, tokens: int, vocabulary: int, checkpoints: bool, result: Any) -> None:
    """Send the MiB that two steps take beyond those before the first, and the losses."""
    warnings.filterwarnings("ignore")
    timer = chunks.Timer()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            packing=way != "TRL padded",
            max_length=tokens,
            per_device_train_batch_size=1 if way != "TRL padded" else tokens // step.DOCUMENT,
            max_steps=2,
            logging_steps=1,
            gradient_checkpointing=checkpoints,
            dataloader_pin_memory=False,
            **ON_CPU,
        )
        trainer = WAYS[way](
            step.model(vocabulary, "fp32", tokens),
            args,
            train_dataset=step.documents(tokens, vocabulary, 3),
            processing_class=step.tiny_tokenizer(),
            callbacks=[timer],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result.send((chunks.peak() - timer.before, losses))


def measure_held(tokens: int, vocabulary: int, checkpoints: bool, result: Any) -> None:
    """Send the MiB of gradients, states of AdamW, and what the backward of the backbone reads."""
    model = step.model(vocabulary, "fp32", tokens).train()
    install_attention(model, resolve_attention(model))
    if checkpoints:
        model.gradient_checkpointing_enable()
    rows = step.documents(tokens, vocabulary, 1)
    batch = PackedCollator()([{"input_ids": row["input_ids"]} for row in rows])
    names = ("labels", "target_counts")
    inputs = {key: value for key, value in for_kernels(batch).items() if key not in names}
    hooks, taken = kept_by_autograd(model)
    with hooks, use_current_row(batch):
        model.model(**inputs)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    result.send((3 * weights + taken()) / 2**20)


def compare(tokens: int, vocabulary: int, checkpoints: bool) -> list[str]:
    held = in_process(measure_held, tokens, vocabulary, checkpoints)
    peaks = {}
    losses = {}
    for way in WAYS:
        if way != "here" and tokens > MOST_TOKENS_OF_TRL:
            continue
        peaks[way], losses[way] = in_process(measure, way, tokens, vocabulary, checkpoints)
    for found in losses.values():  # other documents in a step, but random weights
        assert abs(found[0] - losses["here"][0]) < 0.02 * found[0], losses
    cells = [f"{peaks[way]:,.0f}" if way in peaks else "–" for way in WAYS]
    ratios = []
    for way in ("TRL padded", "TRL packed"):
        ratios.append(f"{peaks['here'] / peaks[way]:.2f}" if way in peaks else "–")
    shown = "on" if checkpoints else "off"
    return [f"{tokens:,}", f"{vocabulary:,}", shown, f"{held:,.0f}", *cells, *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="tokens of a row")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--checkpointing", type=int, nargs="*", default=(0, 1), choices=(0, 1))
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    rows = []
    for tokens in arguments.lengths:
        for vocabulary in arguments.vocabularies:
            for checkpoints in arguments.checkpointing:
                rows.append(compare(tokens, vocabulary, bool(checkpoints)))
                print(*rows[-1], flush=True)
    header = ["row T", "vocabulary", "checkpointing", "held MiB", *(f"{way} MiB" for way in WAYS)]
    header += ["÷ TRL padded", "÷ TRL packed"]
    title = "# Memory of a training step on a CPU"
    publish(f"{title}\n\n{table(header, rows)}\n{provenance()}", arguments.output)


if __name__ == "__main__":
    main()
