"""Draw what is trained of the rows on docs/data.md: `python docs/pictures/draw_data.py`.

A picture on the page follows its row, a JSON block, and names its options:

    ![Trained tokens, with --train_on assistant](pictures/data/assistant.svg)

The row is prepared as `trl-packing inspect` does, by a tokenizer for which a word is one token.
"""

import html
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_packing.documents.labels import IGNORE_INDEX, document_labels
from trl_packing.documents.weights import token_weights
from trl_packing.tools.preview import documents_of_row, run_of_settings

PAGE = Path(__file__).resolve().parents[1] / "data.md"
WIDTH, LINE, CHARACTER, MARGIN = 440, 26, 7.8, 5

_ROW_OR_PICTURE = re.compile(
    r"```json\n(?P<row>[^`]+)\n```|!\[Trained tokens(, with (?P<options>.+?))?\]\((?P<file>[^)]+)\)"
)
_WORD = r"\n|\s?[\p{L}\p{N}]+|\s?[^\s\p{L}\p{N}]+|\s"
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""


class Example(NamedTuple):
    """A row of the page, the options of its run, and the file of its picture."""

    row: dict[str, Any]
    options: list[str]
    file: str


def examples(page: str) -> Iterator[Example]:
    """Yield the rows of a page that have pictures."""
    row: dict[str, Any] = {}
    for found in _ROW_OR_PICTURE.finditer(page):
        if found["row"]:
            row = json.loads(found["row"])
        else:
            yield Example(row, shlex.split(found["options"] or ""), found["file"])


def tokenizer_for(row: Mapping[str, Any], options: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the texts of a row, which makes a token of each word."""
    chat = any(isinstance(value, list) and isinstance(value[0], dict) for value in row.values())
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [*_texts(row), *_texts(options), *_texts("system\nuser\nassistant\ntool\nTools:")]
    backend.train_from_iterator(words, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>" if chat else "</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE if chat else None
    return tokenizer


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a row, at any depth."""
    if isinstance(value, str):
        yield f"{value} {value}"  # a word after a space is another token
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def tokens(example: Example) -> list[tuple[str, float]]:
    """Return the text and the weight of each token that the trainer reads; 0 is not trained."""
    row, options = example.row, [text.replace("\\n", "\n") for text in example.options]
    tokenizer = tokenizer_for(row, options)
    run = run_of_settings(Dataset.from_list([row]), tokenizer, options)
    documents, reason, _ = documents_of_row(run, 0)
    assert not reason, f"{example}: {reason}"
    (document,) = documents
    ids = np.asarray(document["input_ids"])
    labels = document_labels(document, ids)
    weights = np.where(labels == IGNORE_INDEX, 0, token_weights(document, len(ids)))
    weights[:1] = 0  # nothing comes before it
    if "input_ids" in row:
        return list(zip(map(str, ids), weights.tolist(), strict=True))
    texts = list(map(tokenizer.decode, ids))
    assert "".join(texts) == tokenizer.decode(ids), f"{example}: a character has several tokens"
    return list(zip(texts, weights.tolist(), strict=True))


def draw(example: Example) -> str:
    """Return the tokens of a row as SVG: dark with white text if trained, light if not."""
    parts, x, y = [], 0.0, 0
    row = tokens(example)
    for place, (text, weight) in enumerate(row):
        times = f"{weight:g}×" if weight not in (0, 1) else ""
        shown = times + (text.strip(" ") or "␣").replace("\n", "↵")
        width = len(shown) * CHARACTER + 2 * MARGIN
        if x and x + width > WIDTH:
            x, y = 0.0, y + LINE
        fill, ink = ("#1f5fa8", "#ffffff") if weight else ("#d5dbe3", "#1f2328")
        parts.append(
            f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{LINE - 4}" rx="3" fill="{fill}"/>'
            f'<text x="{x + MARGIN:g}" y="{y + 15}" fill="{ink}" '
            f'textLength="{width - 2 * MARGIN:g}">{html.escape(shown)}</text>'
        )
        x += width + 3
        names_a_role = place > 1 and row[place - 2][0] == "<|im_start|>"
        if text.endswith("\n") and not names_a_role:
            x, y = 0.0, y + LINE
    height = y + LINE if x else y
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-size="13" font-family="ui-monospace, monospace" role="img">'
    )
    return "\n".join([head, "<title>Trained tokens are dark</title>", *parts, "</svg>\n"])


if __name__ == "__main__":
    for example in examples(PAGE.read_text()):
        (PAGE.parent / example.file).write_text(draw(example))
        print(example.file)
