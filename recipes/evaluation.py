"""Evaluate by source, with perplexity and a metric of your own, and keep the best model.

    accelerate launch recipes/evaluation.py --config recipes/evaluation.yaml
    accelerate launch recipes/evaluation.py --config recipes/evaluation.yaml \\
        --dataset_name my.jsonl \\
        --dataset_train_split "train[:95%]" --dataset_test_split "train[95%:]"

`eval_loss` is the mean over all trained tokens of the test split. It does not depend on the number
of processes, on the batch size, or on packing. `--loss_weighting document` gives every document the
same weight instead, in training and in evaluation. `--source_column source` adds a loss for each
value of that column. `--load_best_model_at_end true` keeps the checkpoint with the lowest
`eval_loss`, or the best by `--metric_for_best_model`. `--counts_right true` adds a metric of your
own, defined below. This metric needs the logits of every document, so evaluation is padded, and
slower (TRL warns that its version 2 drops such metrics). docs/loss.md has the details.

Expected output (SmolLM2-135M-Instruct, 90 conversations of two sources and 8 held out, four steps
of one bin of 512 tokens, five minutes on a busy CPU core):

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    90 · 19,764 tokens · 12,674 trained (64%)
    packed into  40 bins of 512 tokens · 96.50% filled
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'eval_loss': '1.547', …
    {'loss': '1.462', 'grad_norm': '10.52', … 'epoch': '0.05'}
    …
                                      before   after
    eval_loss                          1.547   1.456
    eval_perplexity                    4.697   4.288
    eval_loss_alpaca                   1.600   1.592
    eval_loss_gsm8k                    1.501   1.341
    The best was outputs/evaluation/checkpoint-4.
    The model is in outputs/evaluation.
"""

from dataclasses import dataclass
from typing import Any

from trl_packing.recipes.recipe_run import Arguments as RunArguments
from trl_packing.recipes.recipe_run import finish, parse

from transformers.hf_argparser import HfArg

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line

SHOWN = ("eval_loss", "eval_perplexity", "eval_right_documents")


@dataclass
class Arguments(RunArguments):
    """The model and the data."""

    dataset_test_split: str = HfArg(default="test", help="Split, or part of one: 'train[1000:]'.")
    counts_right: bool = HfArg(
        default=False, help="Report the share of documents predicted without an error."
    )


def right_documents(prediction: Any) -> dict[str, float]:
    """Return the share of documents in which every trained token is the most likely one."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"right_documents": float(((predicted == labels) | (labels == -100)).all(1).mean())}


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Evaluate before and after training, print both, and return the trainer."""
    # Evaluate when training starts: FSDP2 and ZeRO-2 cannot evaluate earlier.
    arguments, training_args = parse(
        argv, Arguments, output_dir="outputs/evaluation", eval_on_start=True
    )
    trainer = PackedSFTTrainer(
        model=arguments.model_name_or_path,
        args=training_args,
        train_dataset=arguments.rows(),
        eval_dataset=arguments.rows(arguments.dataset_test_split),
        compute_metrics=right_documents if arguments.counts_right else None,
        # Gather one number for each token from all ranks, instead of the whole vocabulary.
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train(training_args.resume_from_checkpoint)
    before = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    after = trainer.evaluate()
    say = trainer.accelerator.print
    say(f"\n{'':<32}  before   after")
    for name in after:
        if name.startswith(SHOWN):
            say(f"{name:<32} {before[name]:>#7.4g} {after[name]:>#7.4g}")
    if training_args.load_best_model_at_end:
        say(f"The best was {trainer.state.best_model_checkpoint}.")
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
