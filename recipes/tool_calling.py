"""Train tool calls: when to call a tool, and how. The answers of the tools are not trained.

    accelerate launch recipes/tool_calling.py --config recipes/tool_calling.yaml

A row of the data set is a conversation and the tools it may use (a list, or JSON):

    {"messages": [{"role": "user", "content": "Weather in Rome?"},
                  {"role": "assistant", "tool_calls": [{"type": "function", "function":
                   {"name": "weather", "arguments": {"city": "Rome"}}}]},
                  {"role": "tool", "content": "21 degrees"},
                  {"role": "assistant", "content": "It has 21 degrees."}],
     "tools": [{"type": "function", "function": {"name": "weather", "parameters": {…}}}]}

ShareGPT's `function_call` and `observation` work too. The chat template must support tools: Qwen's
does; SmolLM2's does not (`--chat_template_path` uses the template of another model). The last row
is held out. The model's reply to it is shown before and after training.

Expected output (SmolLM2-135M-Instruct with Qwen2.5's chat template, forty conversations of Glaive's
up to 768 tokens, six steps of one bin at a learning rate of 2e-4, five minutes on a busy CPU core):

    Trained tokens are between ⟦ and ⟧.
    document · 478 tokens · 113 trained (24%) · ends in '\\n', not trained
    …
    <|im_start|>assistant
    ⟦…<|im_end|>⟧

    before  'You can use the following function to calculate the distance between New York and …'

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    30 · 13,154 tokens · 2,860 trained (22%)
    packed into  21 bins of 768 tokens · 81.56% filled
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '0.903', … 'epoch': '0.09524'}
    …
    after   '<tool_call>\\n{"name": "calculate_distance", "arguments": {"location1": "New York", …'
    The model is in outputs/tool_calling.
"""

from trl_packing.recipes.recipe_run import Arguments, answers, finish, parse, show

from trl_packing import PackedSFTTrainer
from trl_packing.data.files import is_prepared
from trl_packing.tools.options import exits_in_one_line


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Show the trained tokens, train, show replies before and after; return the trainer."""
    arguments, training_args = parse(
        argv, Arguments, output_dir="outputs/tool_calling", train_on="assistant"
    )

    rows = arguments.rows()
    if is_prepared(arguments.dataset_name):  # both sets
        train = rows
        held_out = arguments.rows("eval")
    else:
        train, held_out = rows.select(range(len(rows) - 1)), rows.select([len(rows) - 1])
    trainer = PackedSFTTrainer(
        arguments.model_name_or_path, training_args, train_dataset=train, eval_dataset=held_out
    )
    show(trainer)
    say = trainer.accelerator.print
    asked = [trainer.eval_dataset[0]]
    say(f"\nbefore  {answers(trainer, asked, 64)[0]!r}")
    trainer.train(training_args.resume_from_checkpoint)
    say(f"\nafter   {answers(trainer, asked, 64)[0]!r}")
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
