"""Documents with images: a packed run against TRL's padded run, and the preparation of many rows.

    python benchmarks/images.py --output benchmarks/results/images.md      # about 6 minutes

A Qwen2.5-VL with a tower of 4 layers × 128 and a text model of 4 layers × 256 trains the same
documents in the same steps, by `SFTTrainer` and by `PackedSFTTrainer`, in turns, each run in a
process of its own. Images have the sizes of photographs, answers are of 10 to 300 words, one row in
four has no image. Losses of both runs must agree, or nothing is published.

Preparation is timed apart, on rows with JPEG files.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from machine import Peak, anonymous_mib, provenance, publish, table
from PIL import Image
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision.images import ImageStore

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.vision import tiny_processor, tiny_vision_model

SIZES = [(480, 640), (640, 480), (427, 640), (375, 500), (768, 1024), (334, 500), (600, 400)]
WORDS = ["a", "street", "with", "two", "dogs", "and", "red", "cars", "under", "blue", "sky"]
STEPS, BATCH = 3, 8
MOST_DIFFERENT = 1e-4  # of losses, relative
RUNS = {
    "TRL, padded": (SFTTrainer, SFTConfig, {}),
    "packed": (PackedSFTTrainer, PackedSFTConfig, {"packing": False, "run_page": False}),
}


def processor():
    """Return a processor with patches of 14 × 14 and images of at most 256 tokens."""
    made = tiny_processor("qwen2_5_vl")
    made.image_processor.patch_size = 14
    made.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 256}
    return made


def model(tokens):
    """Return the model of the docstring."""
    text = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "head_dim": 64}
    tower = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
    tower |= {"patch_size": 14, "window_size": 112, "out_hidden_size": 256}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    return tiny_vision_model("qwen2_5_vl", tokens, vision=tower, rope_parameters=rope, **text)


# --- data -----------------------------------------------------------------------------------------


def photograph(rng, height, width):
    """Return smooth noise of a size as a JPEG file."""
    small = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
    file = io.BytesIO()
    small.resize((width, height)).save(file, "JPEG", quality=70)
    return {"bytes": file.getvalue(), "path": None}


def rows(number, files):
    """Yield conversations about images."""
    rng = np.random.default_rng(0)
    for row in range(number):
        images = [files[rng.integers(len(files))]] * (row % 4 != 3)
        words = int(np.exp(rng.uniform(np.log(10), np.log(300))))
        answer = " ".join(rng.choice(WORDS, words))
        parts = [{"type": "image", "text": None} for _ in images]
        question = {"type": "text", "text": f"Question {row}: what is this?"}
        yield {
            "images": images,
            "prompt": [{"role": "user", "content": [*parts, question]}],
            "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
        }


def data(number, folder):
    """Return a data set of `number` rows that is mapped from a file."""
    from datasets import Features, List, Value
    from datasets import Image as ImageFeature

    rng = np.random.default_rng(1)
    files = [photograph(rng, *SIZES[n % len(SIZES)]) for n in range(70)]
    part = {"type": Value("string"), "text": Value("string")}
    messages = List({"role": Value("string"), "content": List(part)})
    features = {"images": List(ImageFeature()), "prompt": messages, "completion": messages}
    return Dataset.from_generator(
        rows,
        features=Features(features),
        gen_kwargs={"number": number, "files": tuple(files)},  # a list would be shards
        cache_dir=folder,
    )


# --- training -------------------------------------------------------------------------------------


def train(name, folder):
    """Return losses, CPU seconds, tokens computed with padding, and the memory of the steps."""
    trainer_class, config_class, options = RUNS[name]
    tokens = processor()
    args = config_class(
        output_dir=f"{folder}/out",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=1e-4,
        **options,
    )
    trainer = trainer_class(
        model=model(tokens),
        args=args,
        train_dataset=data(STEPS * BATCH, folder),
        processing_class=tokens,
    )
    cells: list[int] = []
    seconds: list[float] = []
    peak = Peak()
    step = trainer.training_step

    def count(inner, inputs, *others):
        if not cells:
            peak.start()
        cells.append(inputs["input_ids"].numel())
        start = time.process_time()
        loss = step(inner, inputs, *others)
        seconds.append(time.process_time() - start)
        return loss

    trainer.training_step = count
    before = anonymous_mib()
    trainer.train()
    peak.stop.set()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": losses,
        "seconds": sum(seconds),
        "tokens": sum(cells),
        "mib": peak.mib - before,
    }


def compare(folder, turns):
    """Return the largest difference of losses, and the rows of the table of training."""
    found: dict[str, list] = {name: [] for name in RUNS}
    for turn in range(turns):
        for name in RUNS:
            result = Path(folder, f"{turn}.json")
            command = [sys.executable, __file__, "--run", name, "--result", str(result)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            found[name].append(json.loads(result.read_text()))
    padded, packed = (np.array(results[0]["losses"]) for results in found.values())
    difference = float(np.abs(padded / packed - 1).max())
    if difference > MOST_DIFFERENT:
        sys.exit(f"losses differ: {padded} padded, {packed} packed")
    return difference, [
        [
            name,
            f"{results[0]['tokens']:,}",
            f"{statistics.median(result['seconds'] for result in results):.1f}",
            f"{statistics.median(result['mib'] for result in results):,.0f} MiB",
            f"{results[0]['losses'][-1]:.4f}",
        ]
        for name, results in found.items()
    ]


# --- preparation ----------------------------------------------------------------------------------


def prepare(number, folder):
    """Return a row of the table of preparation."""
    dataset = data(number, folder)
    before = anonymous_mib()
    start = time.process_time()
    ImageStore().take(dataset, "train")
    headers = time.process_time() - start
    after_headers = anonymous_mib()
    tokens = processor()
    start = time.process_time()
    PackedSFTTrainer(
        model=model(tokens),
        args=PackedSFTConfig(
            output_dir=f"{folder}/prepared", max_length=4096, use_cpu=True, report_to="none"
        ),
        train_dataset=dataset,
        processing_class=tokens,
    )
    whole = time.process_time() - start
    some = dataset.data.column("images")[:700].to_pylist()
    size = sum(len(file["bytes"]) for row in some for file in row) / len(some) * number / 2**20
    return [
        f"{number:,}",
        f"{size:,.0f} MiB",
        f"{headers:.1f}",
        f"{after_headers - before:+,.0f} MiB",
        f"{whole:.1f}",
        f"{anonymous_mib() - before:+,.0f} MiB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="write the tables here, too")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--turns", type=int, default=3, help="of each run")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.run:
            options.result.write_text(json.dumps(train(options.run, folder)))
            return
        difference, compared = compare(folder, options.turns)
        prepared = [prepare(number, f"{folder}/{number}") for number in options.rows]
    training = ["run", "tokens computed", "CPU seconds of steps", "memory of steps"]
    preparing = ["rows", "images", "s, headers", "memory", "s, whole trainer", "memory"]
    lines = [
        f"Losses agree within {difference:.1e} in {STEPS} steps of {BATCH} documents; medians of "
        f"{options.turns} turns. Memory of steps is what they need above the built trainer.",
        "",
        table([*training, "loss of the last step"], compared),
        "Preparation on one core; memory is what stays:",
        "",
        table(preparing, prepared),
    ]
    publish("\n".join(["# Documents with images", "", provenance(), *lines]), options.output)


if __name__ == "__main__":
    main()
