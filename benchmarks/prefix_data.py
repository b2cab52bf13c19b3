"""Documents with and without common prefixes, as rows of `input_ids` and `labels`.

16 answers, 4 answers       random tokens: answers to one prompt, shuffled with those to others
system prompt               GSM8K chats; the template adds a system prompt
tool conversations          Glaive, a document for each turn of the assistant
reasoning conversations     four questions of GSM8K each, a document for each turn; the template
                            drops the reasoning of earlier turns
nothing in common           GSM8K as plain text
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

Message = dict[str, str]

VOCABULARY = 40_000  # of random tokens
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
    """Documents of a run: token ids, or conversations of which every turn is a document.

    Attributes:
        name: as written in the tables.
        rows: returns rows from a folder of data: `messages`, or `input_ids` and `labels`.
        template: chat template; None takes the tokenizer's.
    """

    name: str
    rows: Callable[[Path, Any], list[dict[str, Any]]]
    template: str | None = None

    def documents(self, folder: Path, tokenizer: Any) -> Dataset:
        """Return a row of token ids and labels for each document."""
        rows = self.rows(folder, tokenizer)
        if "messages" in rows[0]:
            rows = [d for row in rows for d in every_turn(row["messages"], tokenizer)]
        return Dataset.from_list(rows)


def answers(groups: int, number: int, prompt: int, answer: int) -> list[dict[str, Any]]:
    """Return `number` documents of random tokens for each of `groups` prompts, shuffled."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        first = rng.integers(5, VOCABULARY, prompt).tolist()
        for _ in range(number):
            own = rng.integers(5, VOCABULARY, answer).tolist()
            rows.append({"input_ids": first + own, "labels": [-100] * prompt + own})
    return [rows[i] for i in rng.permutation(len(rows)).tolist()]


def gsm8k(folder: Path, number: int) -> list[dict[str, str]]:
    with (folder / GSM8K).open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(number), strict=False)]


def chats(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return questions and answers; the tokenizer's template adds a system prompt."""
    return [
        {"messages": [message("user", row["question"]), message("assistant", row["answer"])]}
        for row in gsm8k(folder, number)
    ]


def tool_conversations(folder: Path, number: int) -> list[dict[str, Any]]:
    rows = json.loads((folder / GLAIVE).read_text(encoding="utf-8"))[:number]
    return [
        {
            "messages": [
                message("system", f"You may call these functions: {row['tools']}"),
                *(message(ROLES[turn["from"]], turn["value"]) for turn in row["conversations"]),
            ]
        }
        for row in rows
    ]


def reasoning_conversations(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return conversations of four questions; the steps of an answer are its reasoning."""
    conversations = []
    for rows in zip(*[iter(gsm8k(folder, 4 * number))] * 4, strict=True):
        messages = []
        for row in rows:
            reasoning, result = row["answer"].rsplit("\n#### ", 1)
            messages.append(message("user", row["question"]))
            messages.append(message("assistant", result, reasoning))
        conversations.append({"messages": messages})
    return conversations


def plain_text(folder: Path, tokenizer: Any, number: int) -> list[dict[str, Any]]:
    rows = []
    for row in gsm8k(folder, number):
        prompt = tokenizer(row["question"] + "\n")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


def message(role: str, content: str, reasoning: str = "") -> Message:
    return {"role": role, "content": content, "reasoning": reasoning}


def every_turn(messages: Sequence[Message], tokenizer: Any) -> Iterator[dict[str, list[int]]]:
    """Yield a document for each turn of the assistant, rendered up to it as at inference."""
    for turn, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        before, until = (
            tokenizer.apply_chat_template(part, return_dict=False, add_generation_prompt=is_prompt)
            for part, is_prompt in ((messages[:turn], True), (messages[: turn + 1], False))
        )
        assert until[: len(before)] == before
        stop = len(until) - until[::-1].index(tokenizer.eos_token_id)
        yield {
            "input_ids": until[:stop],
            "labels": [-100] * len(before) + until[len(before) : stop],
        }


CASES = {
    "16-answers": Case(
        "16 answers of 128 tokens to a prompt of 512", lambda *_: answers(2, 16, 512, 128)
    ),
    "4-answers": Case(
        "4 answers of 128 tokens to a prompt of 2,048", lambda *_: answers(2, 4, 2048, 128)
    ),
    "system": Case("GSM8K chats with a system prompt", lambda folder, _: chats(folder, 48)),
    "tools": Case("tool conversations", lambda folder, _: tool_conversations(folder, 8)),
    "reasoning": Case(
        "reasoning conversations", lambda folder, _: reasoning_conversations(folder, 8), THINKING
    ),
    "nothing": Case(
        "GSM8K as plain text, nothing in common",
        lambda folder, tokenizer: plain_text(folder, tokenizer, 48),
    ),
}
