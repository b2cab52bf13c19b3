"""A run that survives being killed: the same command starts it and continues it.

    accelerate launch recipes/resuming.py --config recipes/resuming.yaml    # killed at step 57 …
    accelerate launch recipes/resuming.py --config recipes/resuming.yaml    # … continues at step 50

You can kill the run at any time, even while it saves: a half-written checkpoint is recognized, and
the one before it is used. The resumed run continues with exactly the batches that the uninterrupted
run would have used, in any epoch, and ends with the same weights (to the last bit on a CPU; sums on
a GPU vary). With settings that change these batches it is refused. To start over, name another
`--output_dir`.

Expected output (a model of 39,072 random weights, 300 rows, saving every 20 steps). The first
command was killed with SIGKILL while it wrote checkpoint-40. Its output ended with

    {'loss': '5.175', 'grad_norm': '0.9703', 'learning_rate': '0.0004862', …

and the second command prints:

    Continuing from checkpoint-20.

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    300 · 133,568 tokens · 74,779 trained (56%)
    packed into  67 bins of 2,048 tokens · 97.34% filled
    …
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '5.175', 'grad_norm': '0.9703', 'learning_rate': '0.0004862', … 'epoch': '0.597'}
    …
    The model is in outputs/resuming.
"""

from pathlib import Path

from trl_packing.recipes.recipe_run import Arguments, finish, parse

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line
from trl_packing.training.checkpoints import last_whole_checkpoint


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Start, or continue from the last complete checkpoint; return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, output_dir="outputs/resuming", save_steps=50, save_total_limit=2
    )

    rows = arguments.rows()
    trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, train_dataset=rows)
    say = trainer.accelerator.print
    checkpoint = last_whole_checkpoint(Path(training_args.output_dir))
    if checkpoint is None:
        say(f"No checkpoint in {training_args.output_dir}: starting.")
    else:
        say(f"Continuing from {checkpoint.name}.")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
