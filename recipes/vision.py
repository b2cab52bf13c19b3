"""Train a vision-language model on rows with several images, one, or none, packed.

    python recipes/vision.py                                               # a demo, offline
    accelerate launch recipes/vision.py --config recipes/vision_8b.yaml

A row has its images beside its messages, one image part for each (docs/images.md):
    {"images": ["street.jpg"], "messages": [
      {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
      {"role": "assistant", "content": [{"type": "text", "text": "A street."}]}]}

Rows of several data sets, some of them without images, are named by `datasets:` (docs/mixtures.md).
Answers alone are trained. With `--lora_r`, an adapter of the language model is trained, and with
`--train_tower true` one of the tower and the projector, too. The demo teaches a small model the
colors of pictures; `trl-packing inspect recipes/vision.py --html rows.html` shows its rows.

Expected output (the demo, two minutes on a busy CPU core):

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    600 · 59,541 tokens · 7,229 trained (12%)
    images       596 in 441 documents · 38,800 tokens (65%) · …
    packed into  59 bins of 1,024 tokens · 98.55% filled
    …
    checked      isolated: differs by 3e-6, rounding allows 2e-5, a leak would be 1.5
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '4.398', … 'epoch': '0.339'} …
    Loss on new pictures: 0.05. With the pictures of other rows: 0.80.
    The model is in outputs/vision.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_packing.recipes.recipe_data import DataArguments, load_data
from trl_packing.recipes.recipe_run import finish, parse

from transformers import AutoProcessor
from transformers.hf_argparser import HfArg

from trl_packing import PackedSFTTrainer
from trl_packing.attention.model_facts import check_model
from trl_packing.tools.options import exits_in_one_line

DEMO: dict[str, float] = {"max_length": 1024, "per_device_train_batch_size": 1, "logging_steps": 20}
DEMO |= {"learning_rate": 2e-3, "num_train_epochs": 3, "warmup_steps": 10}
LANGUAGE_MODEL = r".*\.(language_model|text_model)\..*_proj"  # its matrices


@dataclass
class Arguments(DataArguments):
    """The model and the data; without them, the demo's."""

    model_name_or_path: str | None = HfArg(default=None, help="Hub id, or a folder with a model.")
    image_folder: str = HfArg(default="", help="Folder of the paths of images.")
    max_pixels: int | None = HfArg(default=None, help="Scale images down (Qwen-VL, GLM-4V).")
    lora_r: int = HfArg(default=0, help="Rank of an adapter, with alpha twice it; 0: all weights.")
    train_tower: bool = HfArg(default=False, help="Adapt the tower and the projector, too.")


def in_folder(rows: Any, folder: str) -> Any:
    """Return rows whose paths of images are read from `folder`; rows without images as they are."""
    if isinstance(rows, dict):
        return {name: in_folder(of_source, folder) for name, of_source in rows.items()}
    column = next((name for name in ("images", "image") if name in rows.column_names), None)
    if column is None or not folder:
        return rows

    def moved(path: Any) -> Any:
        if isinstance(path, list):
            return [moved(each) for each in path]
        return path and str(Path(folder, path))

    return rows.map(lambda row: {column: moved(row[column])})


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train, compare the losses of the demo, save the model, and return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, demo=DEMO, output_dir="outputs/vision", train_on="assistant"
    )
    model = arguments.model_name_or_path
    is_demo = model is None
    if is_demo:
        from trl_packing.recipes.demo_pictures import demo_model, demo_rows, exchanged

        rows = demo_rows(600)
        model, processor = demo_model(training_args.seed)
    else:
        pixels = {"max_pixels": arguments.max_pixels} if arguments.max_pixels else {}
        check_model(model, training_args)
        processor = AutoProcessor.from_pretrained(model, **pixels)
        rows, _ = load_data(arguments, training_args, processor, kept=("images", "image"))
        rows = in_folder(rows, arguments.image_folder)
    adapter = None
    rank = arguments.lora_r
    if rank:
        from peft import LoraConfig

        matrices = "all-linear" if arguments.train_tower else LANGUAGE_MODEL
        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=matrices)
    trainer = PackedSFTTrainer(
        model, training_args, train_dataset=rows, processing_class=processor, peft_config=adapter
    )
    trainer.train(training_args.resume_from_checkpoint)
    say = trainer.accelerator.print
    if is_demo:
        new = demo_rows(60, pictures=[1], seed=1)
        right, wrong = (trainer.evaluate(r)["eval_loss"] for r in (new, exchanged(new)))
        say(f"Loss on new pictures: {right:.2f}. With the pictures of other rows: {wrong:.2f}.")
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
