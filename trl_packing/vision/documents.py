"""Rows with images → documents: token ids, labels, and the image to which each token belongs.

    tokens       <|im_start|> user \\n <pad> What ? …  every run of feature tokens as one token
    input_ids    11  12  13  99 99 99 99  14 15 …      runs in full length
    image_ids     0   0   0   1  1  1  1   0  0 …      number of the image in the row

Tokens and labels are those of TRL's collator, unless `train_on` chooses others: it processes a few
rows of each data set with their pixels, and a difference is an error.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import ProcessorMixin
from trl.data_utils import common_prefix_length, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.data.bad_rows import check_weights_have_tokens
from trl_packing.data.chat_template import TEMPLATE_ERRORS, ChatTemplate
from trl_packing.data.messages import Message, has_flags
from trl_packing.data.row_format import RowFormat
from trl_packing.data.rules import Rules
from trl_packing.data.spans import Rendered, Tokenized, flat_tokens, tokenize
from trl_packing.documents.labels import (
    HANDLED,
    IGNORE_INDEX,
    IMAGE_IDS,
    IMAGE_ROW,
    TOKEN_WEIGHTS,
    Batch,
    Document,
    document_columns,
    row_name,
)
from trl_packing.vision.images import ImageStore
from trl_packing.vision.sizes import (
    Placeholder,
    Size,
    feature_id,
    placeholder_token,
    placeholders_of,
)

Runs = list[tuple[int, int]]  # the image of each run of feature tokens, from 1, and its tokens

_MESSAGES = ("messages", "prompt", "completion")
WAY_OUT = "TRL's SFTTrainer trains rows with images padded"


def documents_with_images(
    dataset: Dataset,
    rules: Rules,
    store: ImageStore,
    patch_size: int,
    name: str,
) -> tuple[Dataset, list[tuple[int, int]]]:
    """Return the documents of a data set, and the numbers of images and patches of each row.

    Args:
        dataset: the rows, with numbers in place of their images.
        rules: of the run.
        store: the image files.
        patch_size: pixels of a side of a patch of the tower.
        name: of the data set, for messages.

    Raises:
        ValueError: naming the row, which cannot be rendered, or has other tokens by its pixels.
    """
    processor = rules.processing_class
    weighted = has_flags(dataset, dataset[0])
    row_format = _row_format(rules, weighted)
    sizes = [store.sizes(row) for row in dataset[IMAGE_ROW]]
    keys = [*map(keys_of, sizes)]
    places = {key: row_name(row, name) for row, of in enumerate(keys) for key in of}
    learned = placeholders_of(processor, places, patch_size)
    images, loads = [], []
    for of_row in keys:
        placeholders = [learned[key] for key in of_row]
        images.append(placeholders)
        loads.append((len(placeholders), sum(image.patches for image in placeholders)))
    kept = document_columns(dataset.column_names, rules.options.named_columns())
    documents = dataset.with_format(None).map(
        _tokenize_batch,
        fn_kwargs={
            "row_format": row_format,
            "token": placeholder_token(processor),
            "feature": feature_id(processor),
            "images": images,
            "name": name,
            "weighted": weighted and row_format.train_on in ("assistant", "last_assistant"),
        },
        batched=True,
        with_indices=True,
        remove_columns=[column for column in dataset.column_names if column not in kept],
        num_proc=rules.args.dataset_num_proc,
        desc=f"Tokenizing {name} dataset",
    )
    collate = DataCollatorForVisionLanguageModeling(
        processor,
        completion_only_loss="completion" in dataset.column_names and row_format.completion_only,
        dataset_text_field=rules.args.dataset_text_field,
        assistant_only_loss=row_format.assistant_only and row_format.train_on is None,
        chat_template=rules.row_format.chat.override,
    )
    compared = ("input_ids", "labels") if row_format.train_on is None else ("input_ids",)
    for number in _spread(sizes):
        row = {key: value for key, value in dataset[number].items() if value is not None}
        expected = collate([{**row, "images": store.load(row[IMAGE_ROW])}])
        document = documents[number]
        other = [c for c in compared if expected[c][0].tolist() != document[c]]
        if other:
            raise ValueError(
                f"{row_name(number, name)} has other {other[0]} by its image sizes "
                f"than {type(processor).__name__} makes of its pixels; {WAY_OUT}"
            )
    return documents, loads


def _row_format(rules: Rules, weighted: bool) -> RowFormat:
    """Return the row format of rows with images; `weighted`: their messages have flags."""
    processor = rules.processing_class
    template = processor.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    # The rules of TRL: no EOS is added.
    chat = ChatTemplate(processor.tokenizer, rules.row_format.chat.override or template)
    made = replace(rules.row_format, chat=chat, eos_token="")
    return replace(made, train_on="assistant") if weighted and made.flags_decide else made


def check_settings(dataset: Dataset, rules: Rules, name: str) -> None:
    """Raise ValueError for settings and columns that rows with images cannot serve."""
    options = rules.options
    names = (
        "prompt_template",
        "response_template",
        "static_shapes",
        "append_eos",
        "max_tokens_per_micro_batch",
        "max_tokens_in_memory",
    )
    given = [f"{name}={getattr(options, name)!r}" for name in names if getattr(options, name)]
    if rules.row_format.makes_turns:
        given.append("train_on='every_turn'")
    if given:
        raise ValueError(f"{given[0]} is not available for data sets with images; leave it out")
    if not isinstance(rules.processing_class, ProcessorMixin):
        raise ValueError(
            f"the {name} dataset has images, but processing_class is a "
            f"{type(rules.processing_class).__name__}; pass the model's processor (AutoProcessor)"
        )
    check_weights_have_tokens(dataset.column_names, name)


def keys_of(sizes: np.ndarray) -> list[Size]:
    """Return the keys of a row's images by their heights and widths, ``(images, 2)``."""
    return [(int(height), int(width), min(len(sizes), 2)) for height, width in sizes]


def _spread(sizes: Sequence[np.ndarray]) -> set[int]:
    """Return the numbers of a few rows: with the most images, with the smallest, and others."""
    areas = [of_row.prod(axis=1).max(initial=0) or np.inf for of_row in sizes]
    counts = [len(of_row) for of_row in sizes]
    return {0, len(sizes) // 2, len(sizes) - 1, int(np.argmin(areas)), int(np.argmax(counts))}


def _tokenize_batch(
    batch: Batch,
    indices: Sequence[int],
    row_format: RowFormat,
    token: str,
    feature: int,
    images: Sequence[Sequence[Placeholder]],
    name: str,
    weighted: bool,
) -> dict[str, list[Any]]:
    texts: list[Any] = []
    made = []
    for index, *values in zip(indices, *batch.values(), strict=True):
        with _naming(index, name):
            row = dict(zip(batch, values, strict=True))
            texts.append(_texts_of(row, images[index], row_format, token))
    flat = [rendered for of_row in texts for rendered, _ in of_row]
    tokens = iter(tokenize(row_format.chat.tokenizer, flat))
    for index, of_row in zip(indices, texts, strict=True):
        with _naming(index, name):
            parts = [_in_full_length(next(tokens), runs, feature, token) for _, runs in of_row]
        ids, weights, numbers = map(np.concatenate, zip(*parts, strict=True))
        labels = np.where(weights > 0, ids, IGNORE_INDEX)
        made.append((ids, labels, numbers, of_row[0][0].handled, weights))
    names = ["input_ids", "labels", IMAGE_IDS, HANDLED]
    if weighted:
        names.append(TOKEN_WEIGHTS)
    return dict(zip(names, map(list, zip(*made, strict=True)), strict=False))


@contextmanager
def _naming(row: int, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, *TEMPLATE_ERRORS) as error:
        raise ValueError(f"{row_name(row, name)}: {error}") from error


def _texts_of(
    row: Document, images: Sequence[Placeholder], row_format: RowFormat, token: str
) -> list[tuple[Rendered, Runs]]:
    """Return the text of a row, prompt and completion apart, as TRL.

    Runs of feature tokens are one token.
    """
    row = _with_image_parts(row, len(images))
    splits = row_format.train_on is None and row.get("completion") is not None
    form = replace(row_format, completion_only=True) if splits else row_format
    [rendered] = form.documents(row, form.form(row))
    found = rendered.text.count(token)
    if found != len(images):
        raise ValueError(
            f"its text has {found} image placeholders ({token}), but it has {len(images)} images; "
            "give one image part for each image"
        )
    # The processor tokenizes prompt and answer together.
    rendered = replace(rendered, prompt_ends=())
    parts = [rendered]
    if splits and rendered.prompt is not None:
        text = rendered.text
        end = common_prefix_length(rendered.prompt, rendered.text)
        parts = [
            replace(rendered, text=text[:end], spans=[] if row_format.completion_only else None),
            replace(rendered, text=text[end:], spans=None),
        ]
    texts = []
    numbered = enumerate(images, start=1)
    for part in parts:
        own = list(islice(numbered, part.text.count(token)))
        runs = [(number, run) for number, image in own for run in image.runs]
        texts.append((_expanded(part, token, [image.text for _, image in own]), runs))
    return texts


def _in_full_length(tokenized: Tokenized, runs: Runs, feature: int, token: str) -> list[np.ndarray]:
    """Return ids, weights and images of a text, every run of feature tokens in full, ``(T,)``."""
    ids, _, weights = flat_tokens([tokenized])
    at = np.flatnonzero(ids == feature)
    if len(at) != len(runs):
        raise ValueError(
            f"its text holds the token of images ({token}) outside of images; remove it"
        )
    times = np.ones(len(ids), np.int64)
    images = np.zeros(len(ids), np.int32)
    times[at] = [length for _, length in runs]
    images[at] = [number for number, _ in runs]
    return [np.repeat(values, times) for values in (ids, weights, images)]


def _with_image_parts(row: Document, num_images: int) -> Document:
    """Return a row whose messages have lists of parts as contents, as TRL makes them."""
    row = dict(row)
    images: list[Any] = [{}] * num_images  # of the first conversation
    for name in _MESSAGES:
        if isinstance(row.get(name), list):
            messages = [*map(_without_nulls, row[name])]
            row[name] = prepare_multimodal_messages(messages, images=images)
            images = []
    return row


def _without_nulls(message: Message) -> Message:
    """Return a message without null entries, which Arrow adds to parts of other types."""
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(message.get("content"), list):
        parts = []
        for given in message["content"]:
            part = {key: value for key, value in given.items() if value is not None}
            parts.append(part)
            others = {"image", "url", "path", "base64"} & part.keys()
            if part.get("type") not in ("text", "image") or others:
                raise ValueError(
                    f"a message has a part of type {part.get('type')!r} with {sorted(part)}; only "
                    "text and images of a column 'images' can be trained here"
                )
        message["content"] = parts
    return message


def _expanded(part: Rendered, token: str, texts: Sequence[str]) -> Rendered:
    """Return `part` with the placeholders of the model in place of those of its template."""
    left = iter(texts)
    place = np.arange(len(part.text) + 1)
    for found, text in zip(re.finditer(re.escape(token), part.text), texts, strict=True):
        place[found.start() + 1 :] += len(text) - len(token)
    text = re.sub(re.escape(token), lambda _: next(left), part.text)
    spans = part.spans
    if spans is not None:
        spans = [(int(place[start]), int(place[stop]), weight) for start, stop, weight in spans]
    return replace(part, text=text, spans=spans, prompt=None, adds_special_tokens=False)


class ImageTokens(NamedTuple):
    """Tokens ``[start, stop)`` of a document that stand for an image, separators included."""

    image: int  # its number in the user's row, from 0
    start: int
    stop: int


def images_of(document: Document) -> list[ImageTokens]:
    """Return the images of a document in their order; none without the column `image_ids`.

    Examples:
        >>> images_of({"input_ids": [5, 9, 9, 6], "image_ids": [0, 1, 1, 0]})
        [ImageTokens(image=0, start=1, stop=3)]
    """
    ids = np.asarray(document.get(IMAGE_IDS, ()), np.int64)
    found = []
    for image in range(ids.max(initial=0)):
        places = np.flatnonzero(ids == 1 + image)
        found.append(ImageTokens(image, int(places[0]), int(places[-1]) + 1))
    return found
