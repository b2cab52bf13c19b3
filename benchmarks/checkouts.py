"""Compare two checkouts: losses to the last bit, reports, and speed.

    git worktree add ../before COMMIT
    python benchmarks/checkouts.py ../before . --output benchmarks/results/checkouts.md
    python benchmarks/checkouts.py ../before . --only losses      # or times

This is for a change that must change nothing, such as moved modules. Both checkouts train the same
tiny models on the demo's data, each in a separate process: full fine-tuning, padding-free steps,
weighted documents, LoRA, a stream, and a run that is resumed from a checkpoint. Every logged number
that does not measure time is compared with all its digits, and so are the final weights. Then both
checkouts are timed in turns, each time in a new process: the import, `--help`, planning,
preparation, the dataloader and training steps, in seconds of CPU time.
"""

import argparse
import difflib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import provenance, publish, table

TIMED = ("import", "help", "plan", "prepare", "dataloader", "step")
#: Words in the names of logged numbers that measure time or memory.
NOT_COMPARED = ("second", "runtime", "memory", "flos", "time")

# --- inside one checkout --------------------------------------------------------------------------


def rows(number: int) -> list[dict[str, str]]:
    from trl_packing import load_rows

    demo = Path(os.environ["CHECKOUT"]) / "recipes/demo/data/train.jsonl"
    return load_rows(str(demo)).select(range(number))


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(os.environ["CHECKOUT"]) / "recipes/demo/tokenizer")


def model(hidden_size: int = 64) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=len(tokenizer()),
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def trainer(folder: str, dataset: Any, **settings: Any) -> Any:
    from trl_packing import PackedSFTConfig, PackedSFTTrainer

    peft_config = settings.pop("peft_config", None)
    options = {
        "packing": True,
        "max_length": 256,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_strategy": "no",
    }
    arguments = PackedSFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-3,
        **{**options, **settings},
    )
    return PackedSFTTrainer(
        model(),
        arguments,
        train_dataset=dataset,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def history(trained: Any) -> list[dict[str, Any]]:
    """Return the logged numbers that do not measure time or memory; floats with all digits."""
    return [
        {
            name: value.hex() if isinstance(value, float) else value
            for name, value in entry.items()
            if not any(word in name for word in NOT_COMPARED)
        }
        for entry in trained.state.log_history
    ]


def weights(trained: Any) -> str:
    """Return a checksum of all parameters."""
    import hashlib

    digest = hashlib.sha256()
    for name, parameter in sorted(trained.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def losses() -> dict[str, Any]:
    """Return the logs, the weights and the report of each run."""
    from datasets import Dataset
    from peft import LoraConfig

    dataset = Dataset.from_list(list(rows(400)))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    runs: dict[str, dict[str, Any]] = {
        "full": {},
        "padding-free": {"packing": False},
        "documents": {"documents_per_step": 16, "loss_weighting": "document"},
        "lora": {"peft_config": lora},
        "stream": {},
    }
    found = {}
    for name, settings in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            chosen = dataset.to_iterable_dataset(num_shards=2) if name == "stream" else dataset
            trained = trainer(folder, chosen, **settings)
            trained.train()
            evaluated = {} if name == "stream" else trained.evaluate(dataset.select(range(40)))
            found[name] = {
                "log": history(trained),
                "weights": weights(trained),
                "eval_loss": float(evaluated.get("eval_loss", 0.0)).hex(),
                "report": json.loads(trained.packing_report.to_json()),
                "report text": str(trained.packing_report),
            }
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 2, "max_steps": -1}
        trainer(folder, dataset, **saving).train()
        resumed = trainer(folder, dataset, **saving)
        resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-5"))
        found["resumed"] = {"log": history(resumed), "weights": weights(resumed)}
    return found


def timed(what: str) -> float:
    """Return the CPU seconds of one piece of work that a user waits for."""
    if what in ("import", "help"):
        arguments = ["-c", "import trl_packing"] if what == "import" else ["-m", "trl_packing.cli"]
        before = os.times()
        command = [sys.executable, *arguments, *(["--help"] if what == "help" else [])]
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        spent = after.children_user + after.children_system
        return spent - before.children_user - before.children_system
    make = {"plan": _plan, "prepare": _prepare, "dataloader": _dataloader, "step": _step}[what]
    with tempfile.TemporaryDirectory() as folder:
        work = make(folder)
        gc.collect()  # one collection of all that the imports left takes 0.3 s, wherever it falls
        gc.freeze()
        began = time.process_time()
        work()
        return time.process_time() - began


def _plan(folder: str) -> Callable[[], Any]:
    import numpy as np

    from trl_packing import PackedBatchSampler

    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 1_000_000).astype(int).clip(8, 4096)

    def plan() -> None:
        sampler = PackedBatchSampler(lengths, 4096, num_ranks=8, accumulation=4, seed=1)
        sampler.set_epoch(1)
        next(iter(sampler))

    return plan


def _prepare(folder: str) -> Callable[[], Any]:
    from datasets import Dataset, disable_caching

    disable_caching()
    dataset = Dataset.from_list(list(rows(5000)) * 2)
    trainer(folder, dataset.select(range(50)))  # imports and warm-up
    return lambda: trainer(folder, dataset)


def _dataloader(folder: str) -> Callable[[], Any]:
    from datasets import Dataset

    dataset = Dataset.from_list(list(rows(5000)))
    loader = trainer(folder, dataset, max_length=4096).get_train_dataloader()
    return lambda: [sum(batch["input_ids"].numel() for batch in loader) for _ in range(20)]


def _step(folder: str) -> Callable[[], Any]:
    from datasets import Dataset

    dataset = Dataset.from_list(list(rows(2000)))
    settings = {"max_length": 2048, "max_steps": 12, "gradient_checkpointing": False}
    ready = trainer(folder, dataset, **settings)
    return ready.train


# --- both checkouts -------------------------------------------------------------------------------


def inside(checkout: Path, what: str) -> Any:
    """Run this file with the package of `checkout`, and return its result."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "CHECKOUT": str(checkout)}
    command = [sys.executable, __file__, "--inside", what]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, cwd=checkout)
    return json.loads(run.stdout.decode().rpartition("RESULT ")[2])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the runs and parts in which two checkouts differ, each with the lines that differ."""
    return [
        f"{run}, {part}:\n{changed_lines(value, after[run][part])}"
        for run, parts in before.items()
        for part, value in parts.items()
        if after[run][part] != value
    ]


def changed_lines(before: Any, after: Any) -> str:
    """Return the lines of two texts, or of two values as JSON, that differ."""
    old, new = (v if isinstance(v, str) else json.dumps(v, indent=0) for v in (before, after))
    compared = difflib.ndiff(old.splitlines(), new.splitlines())
    return "\n".join(f"    {line}" for line in compared if line.startswith(("+ ", "- ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=Path, help="folder of the old checkout")
    parser.add_argument("after", nargs="?", type=Path, help="folder of the new checkout")
    parser.add_argument("--turns", type=int, default=5, help="timings of each checkout")
    parser.add_argument("--only", choices=("losses", "times"), help="leave the other part out")
    parser.add_argument("--output", help="Markdown file to write")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        found = losses() if arguments.inside == "losses" else timed(arguments.inside)
        print("RESULT " + json.dumps(found))
        return
    if arguments.after is None:
        parser.error("name the folders of two checkouts")
    checkouts = arguments.before.resolve(), arguments.after.resolve()
    text = "# Two checkouts compared\n\n"
    if arguments.only != "times":
        before, after = (inside(checkout, "losses") for checkout in checkouts)
        wrong = differences(before, after)
        text += f"Runs: {', '.join(before)}. Different: {len(wrong) or 'nothing'}.\n\n"
        text += "".join(f"{difference}\n\n" for difference in wrong)
    if arguments.only != "losses":
        seconds: dict[str, list[list[float]]] = {what: [[], []] for what in TIMED}
        for turn in range(arguments.turns):
            for what in TIMED:
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    seconds[what][which].append(inside(checkouts[which], what))
        medians = {w: [statistics.median(runs) for runs in both] for w, both in seconds.items()}
        lines = [[w, f"{b:.2f}", f"{a:.2f}", f"{a / b:.3f}"] for w, (b, a) in medians.items()]
        text += table(["CPU seconds, median", "before", "after", "after / before"], lines) + "\n"
    publish(text + provenance(), arguments.output)


if __name__ == "__main__":
    main()
