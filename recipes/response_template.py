"""Train only the text after a marker such as "### Response:".

    accelerate launch recipes/response_template.py --config recipes/response_template.yaml

A row of the data set has a column `text` (`--dataset_text_field` names another column):

    {"text": "### Instruction:\\nName a fruit.\\n\\n### Response:\\nApple"}

The marker is found in the text and not in its tokens, so it does not matter how the marker is
tokenized. If a text has several questions, `--instruction_template "### Instruction:"` trains every
answer up to the next question. Texts without the marker are counted and left out. TRL removed the
collator that did this; `trl_packing` still has it:

    collator = DataCollatorForCompletionOnlyLM("### Response:\\n", tokenizer=tokenizer)
    PackedSFTTrainer(…, data_collator=collator)

Expected output (SmolLM2-135M-Instruct, thirty texts, three steps of one bin of 512 tokens, three
minutes on a busy CPU core):

    Trained tokens are between ⟦ and ⟧.
    document · 148 tokens · 125 trained (84%) · ends in '<|im_end|>', trained
    ### Instruction:
    …
    ### Response:
    ⟦…<|im_end|>⟧

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    30 · 5,974 tokens · 5,207 trained (87%)
    packed into  12 bins of 512 tokens · 97.23% filled
    …
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by …
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '1.259', … 'epoch': '0.08333'}
    …
    The model is in outputs/response_template.
"""

from trl_packing.recipes.recipe_run import Arguments, finish, parse, show

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Show the first text, train, save the model, and return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, output_dir="outputs/response_template", response_template="### Response:\n"
    )

    rows = arguments.rows()
    if training_args.dataset_text_field in rows.column_names:  # not those that are prepared
        rows = rows.select_columns(training_args.dataset_text_field)
    trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, train_dataset=rows)
    show(trainer)
    trainer.train(training_args.resume_from_checkpoint)
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
