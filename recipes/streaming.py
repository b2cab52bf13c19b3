"""Train on a stream: data that is read during training, for example because it exceeds the disk.

    accelerate launch recipes/streaming.py --config recipes/streaming.yaml
    torchrun --nproc_per_node 2 recipes/streaming.py --config recipes/streaming.yaml \\
        --dataset_name folder_of_jsonl_files --dataloader_num_workers 1

A stream has no length, so `--max_steps` sets the length of training. Documents are packed in
windows of 256 bins, which are shuffled, differently in every epoch. Each file is a shard. If the
number of shards allows it, each rank reads its own shards, with at most one dataloader worker. An
interrupted run continues at the same place (resuming.py). The section "Streams" of docs/data.md has
the details.

Expected output (SmolLM2-135M-Instruct, four files of 100 conversations, three steps of one bin of
512 tokens, two minutes on a busy CPU core):

    Shards in the stream: 4. Ranks: 1. Each rank reads its own shards.

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    a stream: counted as it is read
    micro-batch  1 bin
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '1.527', 'grad_norm': '7.646', 'learning_rate': '0', … 'epoch': '0.3333'}
    …
    The model is in outputs/streaming.
"""

from dataclasses import dataclass

from trl_packing.recipes.recipe_data import SourceConfig, read
from trl_packing.recipes.recipe_run import Arguments as RunArguments
from trl_packing.recipes.recipe_run import finish, parse

from transformers.hf_argparser import HfArg

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line


@dataclass
class Arguments(RunArguments):
    """The model and the data."""

    shuffle_buffer: int = HfArg(
        default=0, help="Size of a shuffle buffer in documents, for files sorted by source."
    )


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Print how the stream is divided, train, save the model, and return the trainer."""
    arguments, training_args = parse(argv, Arguments, output_dir="outputs/streaming")

    place = {"name": arguments.dataset_config, "split": arguments.dataset_train_split}
    stream = read(SourceConfig(arguments.dataset_name, **place), streaming=True)
    if arguments.shuffle_buffer:
        stream = stream.shuffle(seed=training_args.seed, buffer_size=arguments.shuffle_buffer)
    trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, train_dataset=stream)
    say, ranks = trainer.accelerator.print, training_args.world_size
    shards = trainer.train_dataset.num_shards
    part = "its own shards" if shards % ranks == 0 else f"the whole stream, for 1/{ranks} of it"
    say(f"Shards in the stream: {shards}. Ranks: {ranks}. Each rank reads {part}.")
    trainer.train(training_args.resume_from_checkpoint)
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
