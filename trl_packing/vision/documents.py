"""Rows with images → documents: token ids, labels, and the image to which each token belongs.

    text         <|im_start|>user\\n<image>What? …     placeholders of a chat template
    tokens       <|im_start|> user \\n <pad> What ? …  every run of feature tokens as one token
    input_ids    11  12  13  99 99 99 99  14 15 …      runs in full length
    image_ids     0   0   0   1  1  1  1   0  0 …      number of the image in the row

The tokens and labels are those that TRL's collator for images computes, unless `train_on` chooses
other labels. A few rows of each data set are run through that collator with their pixels, and a
difference is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from trl.data_utils import common_prefix_length, prepare_multimodal_messages

from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_IDS, TOKEN_WEIGHTS
from trl_packing.formatting.chat_template import TEMPLATE_ERRORS
from trl_packing.formatting.row_format import RowFormat
from trl_packing.formatting.tokenize import Rendered, Tokenized, tokenize
from trl_packing.vision.placeholders import Placeholder, Size

_MESSAGES = ("messages", "prompt", "completion")


@dataclass(frozen=True)
class ImageDocument:
    """One tokenized document; all arrays ``(T,)``.

    Attributes:
        input_ids: token ids, int64.
        weights: float32, 0 on tokens that are not trained.
        image_ids: int32, 0 on text, n on feature tokens of image n − 1 of the row.
    """

    input_ids: np.ndarray
    weights: np.ndarray
    image_ids: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """The ids, with `IGNORE_INDEX` on tokens that are not trained."""
        return np.where(self.weights > 0, self.input_ids, IGNORE_INDEX)


@dataclass(frozen=True)
class ImageRows:
    """Turns rows with images into documents.

    Attributes:
        row_format: how rows are rendered and what is trained.
        token: placeholder of an image in a rendered text.
        feature_id: id of the tokens whose embeddings come from an image.
    """

    row_format: RowFormat
    token: str
    feature_id: int

    @classmethod
    def of(cls, row_format: RowFormat, token: str, feature_id: int) -> "ImageRows":
        """Return the rules of TRL: no EOS is added, and prompts are tokenized alone."""
        return cls(replace(row_format, eos_token=""), token, feature_id)

    def rendered(
        self, row: Mapping[str, Any], placeholders: Sequence[Placeholder]
    ) -> list["ImageText"]:
        """Return the texts of a row whose images have these placeholders: one, or two.

        TRL tokenizes a prompt and its completion apart.

        Raises:
            ValueError: the row cannot be rendered, or has another number of placeholders.
        """
        row = with_image_parts(row, len(placeholders))
        split = self._splits_prompt(row)
        form = replace(self.row_format, completion_only=True) if split else self.row_format
        [rendered] = form.documents(row, form.form(row))
        found = rendered.text.count(self.token)
        if found != len(placeholders):
            raise ValueError(
                f"its text has {found} image placeholders ({self.token}), but it has "
                f"{len(placeholders)} images; give one image part for each image"
            )
        parts = [rendered]
        if split and rendered.prompt is not None:
            parts = _split(rendered)
            if not self.row_format.completion_only:
                parts = [replace(part, spans=None) for part in parts]
        texts, first = [], 0
        for part in parts:
            last = first + part.text.count(self.token)
            numbered = list(enumerate(placeholders, start=1))[first:last]
            runs = [(number, run) for number, image in numbered for run in image.runs]
            texts.append(ImageText(_expanded(part, self.token, placeholders[first:last]), runs))
            first = last
        return texts

    def document(self, texts: Sequence["ImageText"], tokens: Sequence[Tokenized]) -> ImageDocument:
        """Return the document of a row, from its texts and their tokens.

        Raises:
            ValueError: a text has feature tokens that belong to no image.
        """
        parts = [self._part(*pair) for pair in zip(texts, tokens, strict=True)]
        return ImageDocument(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _part(self, text: "ImageText", tokens: Tokenized) -> tuple[np.ndarray, ...]:
        """Return ids, weights and images of a text, every run of feature tokens in full."""
        ids, weights = np.asarray(tokens.input_ids, np.int64), tokens.weights
        weights = np.ones(len(ids), np.float32) if weights is None else weights
        at = np.flatnonzero(ids == self.feature_id)
        if len(at) != len(text.runs):
            raise ValueError(
                f"its text holds the token of images ({self.token}) outside of images; remove it"
            )
        times, image_ids = np.ones(len(ids), np.int64), np.zeros(len(ids), np.int32)
        times[at] = [length for _, length in text.runs]
        image_ids[at] = [number for number, _ in text.runs]
        return tuple(np.repeat(values, times) for values in (ids, weights, image_ids))

    def _splits_prompt(self, row: Mapping[str, Any]) -> bool:
        """Return whether TRL tokenizes prompt and completion of this row apart."""
        return self.row_format.train_on is None and row.get("completion") is not None


class ImageText(NamedTuple):
    """A text with the placeholders of the model, every run of feature tokens as one token.

    Attributes:
        rendered: the text, and what is trained of it.
        runs: image and number of tokens of each run; images count from 1.
    """

    rendered: Rendered
    runs: list[tuple[int, int]]


def with_image_parts(row: Mapping[str, Any], num_images: int) -> dict[str, Any]:
    """Return a row whose messages have lists of parts as contents, as TRL passes them to templates.

    Raises:
        ValueError: the parts and the number of images differ.
    """
    row = dict(row)
    conversations = [name for name in _MESSAGES if isinstance(row.get(name), list)]
    for number, name in enumerate(conversations):
        messages = [_without_nulls(message) for message in row[name]]
        images: list[Any] = [{}] * num_images if number == 0 else []
        row[name] = prepare_multimodal_messages(messages, images=images)
    return row


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null entries, which Arrow adds to parts of other types."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [{k: v for k, v in part.items() if v is not None} for part in content]
        for part in parts:
            if part.get("type") not in ("text", "image"):
                raise ValueError(
                    f"a message has a part of type {part.get('type')!r}; only text and images can "
                    "be trained here"
                )
            if others := {"image", "url", "path", "base64"} & part.keys():
                raise ValueError(
                    f"a message has an image in its part ({', '.join(sorted(others))}); put the "
                    "images into a column 'images', and leave {'type': 'image'} in the message"
                )
        message["content"] = parts
    return message


def _split(rendered: Rendered) -> list[Rendered]:
    """Return prompt and completion of a document, which TRL tokenizes apart."""
    text, end = rendered.text, common_prefix_length(rendered.prompt or "", rendered.text)
    return [
        replace(rendered, text=text[:end], spans=[], prompt=None, adds_special_tokens=False),
        replace(rendered, text=text[end:], spans=None, prompt=None, adds_special_tokens=False),
    ]


def _expanded(part: Rendered, token: str, placeholders: Sequence[Placeholder]) -> Rendered:
    """Return `part` with the placeholders of the model in place of those of its template."""
    pieces = part.text.split(token)
    ends = np.cumsum([len(piece) for piece in pieces]) + len(token) * np.arange(len(pieces))
    growth = np.cumsum([0, *(len(p.text) - len(token) for p in placeholders)])

    def moved(place: int) -> int:
        return place + int(growth[np.searchsorted(ends[:-1], place, side="left")])

    texts = [pieces[0]]
    for placeholder, piece in zip(placeholders, pieces[1:], strict=True):
        texts += [placeholder.text, piece]
    spans = part.spans
    if spans is not None:
        spans = [(moved(start), moved(stop), weight) for start, stop, weight in spans]
    return replace(part, text="".join(texts), spans=spans, prompt=None, adds_special_tokens=False)


def keys_of(sizes: np.ndarray) -> list[Size]:
    """Return the keys of the placeholders of a row's images.

    Args:
        sizes: their heights and widths, ``(images, 2)``.
    """
    return [(int(height), int(width), min(len(sizes), 2)) for height, width in sizes]


# --- images of a document ---------------------------------------------------------------------


class ImageTokens(NamedTuple):
    """Tokens ``[start, stop)`` of a document that stand for an image, separators included.

    Attributes:
        image: number of the image in the user's row, from 0.
        start: its first token in the document.
        stop: the token after its last one.
    """

    image: int
    start: int
    stop: int


def images_of(document: Mapping[str, Any]) -> list[ImageTokens]:
    """Return the images of a document in their order; none without the column `image_ids`.

    Examples:
        >>> images_of({"input_ids": [5, 9, 9, 6], "image_ids": [0, 2, 2, 0]})
        [ImageTokens(image=1, start=1, stop=3)]
    """
    ids = np.asarray(document.get(IMAGE_IDS, ()), np.int64)
    at = np.flatnonzero(ids)
    firsts = np.flatnonzero(np.diff(ids[at], prepend=0))
    lasts = np.append(firsts[1:], len(at)) - 1 if len(at) else firsts
    return [
        ImageTokens(int(ids[start]) - 1, int(start), int(stop) + 1)
        for start, stop in zip(at[firsts], at[lasts], strict=True)
    ]


# --- a whole data set -----------------------------------------------------------------------------


def tokenize_rows(
    dataset: Dataset,
    rows: ImageRows,
    placeholders: Mapping[Size, Placeholder],
    sizes: Sequence[np.ndarray],
    *,
    kept: Sequence[str] = (),
    weighted: bool = False,
    num_proc: int | None = None,
    name: str = "train",
) -> Dataset:
    """Return the documents of a data set, with the columns of tokens and `image_row`.

    Args:
        dataset: the rows, with numbers in place of their images.
        rows: how a row is tokenized.
        placeholders: by size.
        sizes: height and width of the images of each row.
        kept: columns that are kept, `image_row` among them.
        weighted: keep the weights of tokens, too.
        num_proc: processes that tokenize.
        name: of the data set, for messages.

    Raises:
        ValueError: naming the row, for what cannot be rendered or tokenized.
    """
    options = {"rows": rows, "placeholders": placeholders, "sizes": sizes, "name": name}
    return dataset.with_format(None).map(
        _tokenize_batch,
        fn_kwargs=options | {"weighted": weighted},
        batched=True,
        with_indices=True,
        remove_columns=[column for column in dataset.column_names if column not in kept],
        num_proc=num_proc,
        desc=f"Tokenizing {name} dataset",
    )


def _tokenize_batch(
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    rows: ImageRows,
    placeholders: Mapping[Size, Placeholder],
    sizes: Sequence[np.ndarray],
    name: str,
    weighted: bool,
) -> dict[str, list[Any]]:
    def named(index: int, make: Callable[..., Any], *values: Any) -> Any:
        try:
            return make(*values)
        except (ValueError, RuntimeError, *TEMPLATE_ERRORS) as error:
            raise ValueError(f"row {index} of the {name} dataset: {error}") from error

    texts: list[list[ImageText]] = []
    for index, *values in zip(indices, *batch.values(), strict=True):
        found = [placeholders[size] for size in keys_of(sizes[index])]
        texts.append(named(index, rows.rendered, dict(zip(batch, values, strict=True)), found))
    tokens = iter(
        tokenize(
            rows.row_format.chat.tokenizer,
            [text.rendered for of_row in texts for text in of_row],
        )
    )
    documents = [
        named(index, rows.document, of_row, [next(tokens) for _ in of_row])
        for index, of_row in zip(indices, texts, strict=True)
    ]
    made: dict[str, list[Any]] = {
        "input_ids": [document.input_ids for document in documents],
        "labels": [document.labels for document in documents],
        IMAGE_IDS: [document.image_ids for document in documents],
    }
    if weighted:
        made[TOKEN_WEIGHTS] = [document.weights for document in documents]
    return made
