"""Compares a few documents with the tokens and labels that TRL makes of their rows and pixels.

image sizes → arithmetic of the processor → tokens     of every row
pixels → the whole processor → tokens and labels       of a few rows, by TRL's collator
"""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.data.rules import Rules
from trl_packing.documents.labels import IMAGE_ROW
from trl_packing.vision.image_store import ImageStore, NoImages

_COMPARED_ROWS = 3


def difference_from_trl(
    dataset: Dataset,
    documents: Dataset,
    store: ImageStore,
    rules: Rules,
    chat_template: str | None,
    name: str,
) -> str | None:
    """Return how a document differs from TRL's, None if the compared ones do not.

    Args:
        dataset: rows, with numbers in place of their images.
        documents: made of these rows.
        store: the image files.
        rules: by which the documents were made.
        chat_template: replaces the processor's; None: the processor's.
        name: of the data set.
    """
    row_format, processor = rules.row_format, rules.processing_class
    labels_are_trls = row_format.train_on is None
    collate = DataCollatorForVisionLanguageModeling(
        processor,
        completion_only_loss="completion" in dataset.column_names and row_format.completion_only,
        dataset_text_field=rules.args.dataset_text_field,
        assistant_only_loss=row_format.assistant_only and labels_are_trls,
        chat_template=chat_template,
    )
    for number in _spread(store.sizes_of(list(dataset[IMAGE_ROW]))):
        row = {key: value for key, value in dataset[number].items() if value is not None}
        images = store.load(row.pop(IMAGE_ROW))
        expected = collate([{**row, "images": images}])
        document = documents[number]
        for column in ("input_ids", "labels") if labels_are_trls else ("input_ids",):
            tokens = expected[column][0].tolist()
            if tokens != document[column]:
                found = len(tokens) if len(tokens) != len(document[column]) else "other"
                return (
                    f"row {number} of the {name} dataset has {len(document[column])} {column} by "
                    f"its image sizes, but {type(processor).__name__} makes {found} of its pixels"
                )
    return None


def _spread(sizes: Sequence[np.ndarray]) -> list[int]:
    """Return the numbers of a few rows: with the most images, the smallest one, and the first.

    Of rows without images, these are the first, the last, and the one between them.
    """
    if not sizes:
        return []
    if isinstance(sizes, NoImages):
        return sorted({0, len(sizes) // 2, len(sizes) - 1})
    most = int(np.argmax([len(of_row) for of_row in sizes]))
    areas = [int(of_row.prod(axis=1).max(initial=0)) for of_row in sizes]
    smallest = int(np.argmin([area or np.inf for area in areas]))
    return sorted({0, most, smallest})[:_COMPARED_ROWS]
