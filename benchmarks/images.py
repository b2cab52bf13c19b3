"""Documents with images: a packed run against TRL's padded run, and the preparation of many rows.

    python benchmarks/images.py --output benchmarks/results/images.md      # about 2 minutes

A Qwen2.5-VL with a tower of 4 layers × 128 and a text model of 4 layers × 256 trains the same
documents in the same steps, by `SFTTrainer` and by `PackedSFTTrainer`, in turns. Images have the
sizes of photographs, answers are of 10 to 300 words, one row in four has no image. Losses of both
runs must agree first. Preparation is timed apart, on rows with JPEG files.
"""

import argparse
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from machine import anonymous_mib, provenance, publish, table
from PIL import Image
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision.image_store import ImageStore

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.vision import tiny_processor, vision_model

SIZES = [(480, 640), (640, 480), (427, 640), (375, 500), (768, 1024), (334, 500), (600, 400)]
WORDS = ["a", "street", "with", "two", "dogs", "and", "red", "cars", "under", "blue", "sky"]
STEPS, BATCH, TURNS = 2, 8, 2
MOST_DIFFERENT = 1e-4  # of losses, relative


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
    return vision_model("qwen2_5_vl", tokens, text | {"rope_parameters": rope}, tower)


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


def run(trainer_class, config_class, dataset, folder, **options):
    """Return losses, CPU seconds of training, and tokens and cells computed."""
    tokens = processor()
    common = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "max_length": None,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-4,
    }
    trainer = trainer_class(
        model=model(tokens),
        args=config_class(**common, **options),
        train_dataset=dataset,
        processing_class=tokens,
    )
    cells = []
    step = trainer.training_step

    def count(inner, inputs, *others):
        cells.append(inputs["input_ids"].numel())
        return step(inner, inputs, *others)

    trainer.training_step = count
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, seconds, sum(cells)


def compare(folder):
    """Return the rows of the table of training."""
    dataset = data(STEPS * BATCH, folder)
    runs = {
        "TRL, padded": (SFTTrainer, SFTConfig, {}),
        "packed": (PackedSFTTrainer, PackedSFTConfig, {"packing": False, "run_page": False}),
    }
    found: dict[str, list] = {name: [] for name in runs}
    for turn in range(TURNS):
        for name, (trainer_class, config_class, options) in runs.items():
            found[name].append(
                run(trainer_class, config_class, dataset, f"{folder}/{name}{turn}", **options)
            )
    losses = [np.array(results[0][0]) for results in found.values()]
    difference = float(np.abs(losses[0] / losses[1] - 1).max())
    assert difference < MOST_DIFFERENT, losses
    return difference, [
        [
            name,
            f"{results[0][2]:,}",
            f"{statistics.median(seconds for _, seconds, _ in results):.1f}",
            f"{results[0][0][-1]:.4f}",
        ]
        for name, results in found.items()
    ]


def prepare(number, folder):
    """Return the rows of the table of preparation."""
    dataset = data(number, folder)

    before, start = anonymous_mib(), time.process_time()
    ImageStore().take(dataset, "train")
    headers, after_headers = time.process_time() - start, anonymous_mib()
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
    size = (
        sum(
            len(file["bytes"])
            for row in dataset.data.column("images")[:700].to_pylist()
            for file in row
        )
        / 700
        * number
        / 2**20
    )
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
    parser.add_argument("--output", help="write the table here, too")
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 10_000])
    options = parser.parse_args()
    disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        difference, compared = compare(folder)
        prepared = [prepare(number, f"{folder}/{number}") for number in options.rows]
    heads = ["run", "tokens computed", "CPU seconds", "loss of the last step"]
    lines = [
        f"Losses agree within {difference:.1e} in {STEPS} steps of {BATCH} documents.",
        "",
        table(heads, compared),
        "",
        "Preparation on one core:",
        "",
        table(
            ["rows", "images", "s, headers", "memory", "s, whole trainer", "memory"],
            prepared,
        ),
    ]
    publish("\n".join(["# Documents with images", "", provenance(), *lines, ""]), options.output)


if __name__ == "__main__":
    main()
