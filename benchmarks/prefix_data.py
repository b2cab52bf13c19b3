"""Documents with and without common prefixes, as rows of `input_ids` and `labels`.

16 answers, 4 answers       random tokens: answers to one prompt, shuffled with those to others
system prompt               GSM8K chats; the template adds a system prompt
tool conversations          Glaive, a document for each turn of the assistant
reasoning conversations     four questions of GSM8K each, a document for each turn; the template
                            drops the reasoning of earlier turns
nothing in common           GSM8K as plain text
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

Message = dict[str, str]

GSM8K, GLAIVE = "gsm8k_train.jsonl", "glaive_toolcall_en_demo.json"
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['reasoning'] %}"
    "<think>\n{{ message['reasoning'] }}\n</think>\n"
    "{% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Case(NamedTuple):
    """Documents of a run.

    Attributes:
        name: as written in the tables.
        make: returns documents from a folder of data and a tokenizer.
        max_length: tokens of a bin.
    """

    name: str
    make: Callable[[Path, Any], Dataset]
    max_length: int


def answers(groups: int, number: int, prompt: int, answer: int, vocabulary: int) -> Dataset:
    """Return `number` documents of random tokens for each of `groups` prompts, shuffled."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        first = rng.integers(5, vocabulary, prompt).tolist()
        for _ in range(number):
            own = rng.integers(5, vocabulary, answer).tolist()
            rows.append({"input_ids": first + own, "labels": [-100] * prompt + own})
    return Dataset.from_list([rows[i] for i in rng.permutation(len(rows))])


def gsm8k(folder: Path, number: int) -> list[dict[str, str]]:
    with (folder / GSM8K).open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(number), strict=False)]


def chats(folder: Path, tokenizer: Any, number: int) -> Dataset:
    """Return questions and answers in the tokenizer's template, which adds a system prompt."""
    conversations = (
        [message("user", row["question"]), message("assistant", row["answer"])]
        for row in gsm8k(folder, number)
    )
    return Dataset.from_list(list(every_turn(conversations, tokenizer)))


def tool_conversations(folder: Path, tokenizer: Any, number: int) -> Dataset:
    rows = json.loads((folder / GLAIVE).read_text(encoding="utf-8"))[:number]
    conversations = (
        [message("system", f"You may call these functions: {row['tools']}")]
        + [message(ROLES[turn["from"]], turn["value"]) for turn in row["conversations"]]
        for row in rows
    )
    return Dataset.from_list(list(every_turn(conversations, tokenizer)))


def reasoning_conversations(folder: Path, tokenizer: Any, number: int) -> Dataset:
    rows = gsm8k(folder, 4 * number)
    conversations = []
    for first in range(0, len(rows), 4):
        messages = []
        for row in rows[first : first + 4]:
            reasoning, result = row["answer"].rsplit("\n#### ", 1)
            messages.append(message("user", row["question"]))
            messages.append(message("assistant", result, reasoning))
        conversations.append(messages)
    return Dataset.from_list(list(every_turn(conversations, tokenizer, THINKING)))


def plain_text(folder: Path, tokenizer: Any, number: int) -> Dataset:
    rows = []
    for row in gsm8k(folder, number):
        prompt = tokenizer(row["question"] + "\n")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return Dataset.from_list(rows)


def message(role: str, content: str, reasoning: str = "") -> Message:
    return {"role": role, "content": content, "reasoning": reasoning}


def every_turn(
    conversations: Iterable[Sequence[Message]], tokenizer: Any, template: str | None = None
) -> Iterator[dict[str, list[int]]]:
    """Yield a document for each turn of the assistant, rendered up to it as at inference."""
    for messages in conversations:
        for turn, one in enumerate(messages):
            if one["role"] != "assistant":
                continue
            before, until = (
                tokenizer.apply_chat_template(
                    part, chat_template=template, return_dict=False, add_generation_prompt=is_prompt
                )
                for part, is_prompt in ((messages[:turn], True), (messages[: turn + 1], False))
            )
            assert until[: len(before)] == before
            own = until[len(before) :]
            yield {"input_ids": until, "labels": [-100] * len(before) + own}


VOCABULARY = 40_000  # of random tokens

CASES = {
    "16-answers": Case(
        "16 answers of 128 tokens to a prompt of 512",
        lambda folder, tokenizer: answers(2, 16, 512, 128, VOCABULARY),
        4096,
    ),
    "4-answers": Case(
        "4 answers of 128 tokens to a prompt of 2,048",
        lambda folder, tokenizer: answers(2, 4, 2048, 128, VOCABULARY),
        4096,
    ),
    "system": Case(
        "GSM8K chats with a system prompt",
        lambda folder, tokenizer: chats(folder, tokenizer, 48),
        4096,
    ),
    "tools": Case(
        "tool conversations, every turn",
        lambda folder, tokenizer: tool_conversations(folder, tokenizer, 8),
        4096,
    ),
    "reasoning": Case(
        "reasoning conversations, every turn",
        lambda folder, tokenizer: reasoning_conversations(folder, tokenizer, 8),
        4096,
    ),
    "nothing": Case(
        "GSM8K as plain text, nothing in common",
        lambda folder, tokenizer: plain_text(folder, tokenizer, 48),
        4096,
    ),
}
