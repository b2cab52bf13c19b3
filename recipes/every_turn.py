"""Train every turn of a reasoning model, each with the prompt that it has at inference.

    python recipes/every_turn.py                                    # a demo, offline
    accelerate launch recipes/every_turn.py --config recipes/every_turn.yaml

Chat templates of such models drop the reasoning of earlier turns, so one text of a conversation
cannot train them all. With `--train_on every_turn`, each turn becomes a document: the messages
before it as the model reads them at inference, then its reasoning and its answer, which alone are
trained (docs/every-turn.md). Turns of a conversation come in one bin, where the messages that they
share are computed once (`--prefix_sharing group`). A row is a conversation:

    {"messages": [{"role": "user", "content": "7 × 8?"},
                  {"role": "assistant", "reasoning_content": "7 × 7 = 49. 49 + 7 = 56.",
                   "content": "56"}, …]}

Reasoning may also stand in the content (<think>…</think>). The demo counts things on a shelf.

Expected output (the demo, a minute on a busy CPU core):

    Trained tokens are between ⟦ and ⟧.
    document · 42 tokens · 21 trained (50%) · ends in '</s>', trained
    user: 14 plums</s>
    assistant: <think>⟦0 + 14 = 14</think>14 in all</s>⟧
    …
    user: 3 lemons</s>
    assistant: <think>⟦14 + 3 = 17</think>17 in all</s>⟧

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    turns        400 conversations → 1,582 documents, one for each turn
    documents    1,582 · 138,085 tokens · 34,029 trained (25%)
    packed into  161 bins of 512 tokens · 96.70% filled
    prefixes     1.73× fewer tokens computed · 30.8 prefixes a step
    …
    ──────────────────────────────────────────────────────────────────────────────────────
    …
    The model is in outputs/every_turn.
"""

import random

from trl_packing.recipes.make_demo_data import ITEMS
from trl_packing.recipes.recipe_run import Arguments, finish, parse, show
from trl_packing.recipes.sft_packed import load_model

from datasets import Dataset
from trl import ModelConfig

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line

DEMO = {"max_length": 512, "learning_rate": 2e-3, "logging_steps": 10, "num_train_epochs": 1}
# As the templates of reasoning models: earlier thoughts are dropped, the prompt opens new ones.
DEMO_TEMPLATE = """\
{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}<think>\
{{ m.reasoning_content }}</think>{% endif %}{{ m.content + eos_token + '\n' }}{% endfor %}\
{% if add_generation_prompt %}assistant: <think>{% endif %}"""


def demo_rows(number: int = 400) -> Dataset:
    """Return conversations of 1 to 7 turns in which things are put on a shelf and counted."""
    rows = []
    rng = random.Random(0)
    for _ in range(number):
        messages = []
        count = 0
        for _ in range(rng.randint(1, 7)):
            more = rng.randint(2, 20)
            thought = f"{count} + {more} = {count + more}"
            count += more
            answer = {"content": f"{count} in all", "reasoning_content": thought}
            messages.append({"role": "user", "content": f"{more} {rng.choice(ITEMS)}"})
            messages.append({"role": "assistant", **answer})
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Show the documents of two turns, train, save the model, and return the trainer."""
    options = {"train_on": "every_turn", "prefix_sharing": "group"}
    arguments, training_args = parse(
        argv, Arguments, demo=DEMO, output_dir="outputs/every_turn", **options
    )
    model = arguments.model_name_or_path
    tokenizer = None
    if model is None:
        rows = demo_rows()
        model, tokenizer = load_model(training_args, ModelConfig())
        tokenizer.chat_template = DEMO_TEMPLATE
    else:
        rows = arguments.rows()
    trainer = PackedSFTTrainer(model, training_args, train_dataset=rows, processing_class=tokenizer)
    show(trainer, 2)
    trainer.train(training_args.resume_from_checkpoint)
    finish(trainer)
    return trainer


if __name__ == "__main__":
    main()
