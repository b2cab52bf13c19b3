"""Train many answers to each prompt, and compute each prompt once.

    python recipes/shared_prefixes.py                                          # a demo, offline
    accelerate launch recipes/shared_prefixes.py --config recipes/shared_prefixes.yaml

A row of the data set has a prompt and its answers, such as the samples that a checker accepted:

    {"prompt": "What is 7 × 8?", "answers": ["7 × 8 = 56.", "It is 56, because 7 × 8 is …"]}

Each answer becomes a document behind its prompt. Losses and gradients are those of the documents;
`--prefix_sharing off` trains the same, only slower (docs/shared-prefixes.md). In the demo, a small
model names one thing of an order, and each thing is an answer. `trl-packing inspect
recipes/shared_prefixes.py --html rows.html` draws its rows.

Expected output (the demo, half a minute on a CPU core):

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    2,170 · 149,000 tokens · 6,510 trained (4%)
    packed into  31 bins of 1,024 tokens · 94.19% filled
    prefixes     5.0× fewer tokens computed · 13.6 prefixes a step
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': … 'epoch': '0.3226'} …
    Tokens of documents: 149,000.
    Tokens computed: 29,899.
    The model is in outputs/shared_prefixes.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl_packing.recipes.make_demo_data import order
from trl_packing.recipes.recipe_run import Arguments as RunArguments
from trl_packing.recipes.recipe_run import finish, parse
from trl_packing.recipes.sft_packed import load_model

from datasets import Dataset
from transformers.hf_argparser import HfArg
from trl import ModelConfig

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line

DEMO = {"max_length": 1024, "per_device_train_batch_size": 1, "num_train_epochs": 1}


@dataclass
class Arguments(RunArguments):
    """The model and the data; without them, the demo's."""

    prompt_column: str = HfArg(default="prompt", help="Column of the prompts.")
    answers_column: str = HfArg(default="answers", help="Column of an answer, or a list of them.")


def demo_rows(number: int = 300) -> Dataset:
    """Return orders, and the things in each: any of them is a right answer."""
    rows = []
    rng = random.Random(0)
    for _ in range(number):
        document = order(rng)
        prompt = document["prompt"].replace("Packing list:", "One thing of it:")
        things = document["completion"].split("\n- ")[1:]
        rows.append({"prompt": prompt, "answers": [f" {thing}" for thing in things]})
    return Dataset.from_list(rows)


def one_each(rows: dict[str, Any], names: tuple[str, str], chat: bool) -> dict[str, list[Any]]:
    """Return a prompt and a completion for each answer of a batch of rows."""
    made: dict[str, list[Any]] = {"prompt": [], "completion": []}
    for prompt, answers in zip(*(rows[name] for name in names), strict=True):
        for answer in [answers] if isinstance(answers, str) else answers:
            texts = {"prompt": ("user", prompt), "completion": ("assistant", answer)}
            for name, (role, text) in texts.items():
                made[name].append([{"role": role, "content": text}] if chat else text)
    return made


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train, print the tokens that were computed, save the model, and return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, demo=DEMO, output_dir="outputs/shared_prefixes", prefix_sharing="group"
    )
    model = arguments.model_name_or_path
    tokenizer = None
    is_demo = model is None
    if is_demo:
        rows = demo_rows()
        model, tokenizer = load_model(training_args, ModelConfig())
    else:
        rows = arguments.rows()
    if "labels" not in rows.column_names:  # documents of `trl-packing prepare` have them
        names = (arguments.prompt_column, arguments.answers_column)
        make = partial(one_each, names=names, chat=not is_demo)
        rows = rows.map(make, batched=True, remove_columns=rows.column_names)
    trainer = PackedSFTTrainer(model, training_args, train_dataset=rows, processing_class=tokenizer)
    say = trainer.accelerator.print
    metrics = trainer.train(training_args.resume_from_checkpoint).metrics
    say(f"Tokens of documents: {metrics['train_tokens']:,}.")
    say(f"Tokens computed: {metrics.get('train_computed_tokens', metrics['train_tokens']):,}.")
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
