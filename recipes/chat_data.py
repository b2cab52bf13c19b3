"""Train on conversations, and see the trained turns before the run.

    accelerate launch recipes/chat_data.py --config recipes/chat_data.yaml

A row of the data set is a conversation, in one of these forms:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    {"instruction": "Greet me", "input": "", "output": "Hello"}     (this file converts it)

`--train_on assistant` trains every turn of the assistant, including the token that ends the turn;
`last_assistant` trains only its last turn; `all` trains everything. A message can override this
with `"train": false` or `"weight": 0.5`. Any chat template works; docs/data.md explains how the
turns are found.

Expected output (SmolLM2-135M-Instruct, thirty rows of instruction, input and output, six steps of
one bin of 512 tokens, five minutes on a busy CPU core):

    Trained tokens are between ⟦ and ⟧.
    document · 169 tokens · 125 trained (74%) · ends in '\\n', not trained
    …
    <|im_start|>user
    …<|im_end|>
    <|im_start|>assistant
    ⟦…<|im_end|>⟧

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    30 · 6,583 tokens · 5,187 trained (79%)
    packed into  14 bins of 512 tokens · 91.84% filled
    …
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by …
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '2.027', … 'epoch': '0.1429'}
    …
    The model is in outputs/chat_data.
"""

from trl_packing.recipes.recipe_run import Arguments, finish, parse, show

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line


def to_conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a row as a conversation. Change this for the columns of your data set."""
    prompt = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": row["output"]},
        ]
    }


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Show the first conversation, train, save the model, and return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, output_dir="outputs/chat_data", train_on="assistant"
    )

    rows = arguments.rows()
    if "instruction" in rows.column_names:
        rows = rows.map(to_conversation, remove_columns=rows.column_names)
    trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, train_dataset=rows)
    show(trainer)
    trainer.train(training_args.resume_from_checkpoint)
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
