"""Several streams as one: each document is drawn from one of them, by weight.

math    m0 m1 m2 …   weight 3  ┐
                               ├→  m0 m1 c0 m2 m3 m4 c1 …      as many buffers as without a mixture
chat    c0 c1 c2 …   weight 1  ┘

A stream that ends begins again, until all have ended once. So no document is left out.
"""

from collections.abc import Mapping
from typing import Any

from datasets import IterableDataset, interleave_datasets

from trl_packing.config import PackingOptions
from trl_packing.data.stream import NOTHING_TO_TRAIN
from trl_packing.documents.labels import SOURCE
from trl_packing.training.columns import training_columns
from trl_packing.training.mixture import is_mixed


def check_stream_is_not_mixed(dataset: Any, options: PackingOptions) -> None:
    """Raise ValueError if a single stream is to be mixed, whose sources are not known."""
    if isinstance(dataset, IterableDataset) and is_mixed(options):
        name = "mixture" if options.mixture is not None else "mixture_temperature"
        raise ValueError(
            f"{name} draws sources, which a stream tells only by being read; pass train_dataset as "
            f"a dictionary of streams, or leave {name} out"
        )


def stream_shares(names: list[str], options: PackingOptions) -> dict[str, float]:
    """Return the share of the documents that is drawn from each stream; those without are left out.

    Args:
        names: of the streams.
        options: with a weight for each of them.

    Raises:
        ValueError: a stream has no weight, or something else than a weight.
    """
    for name, value in (
        ("mixture_temperature", options.mixture_temperature),
        ("mixture_unit", options.mixture_unit if options.mixture_unit != "documents" else None),
    ):
        if value is not None:
            raise ValueError(
                f"{name}={value!r} needs the sizes of sources, which streams do not tell; give "
                "each stream a weight in mixture (counted in documents)"
            )
    given = options.mixture
    mixture = given if isinstance(given, dict) else {}
    unknown = [name for name in mixture if name not in names]
    if unknown:
        raise ValueError(
            f"mixture names {unknown[0]!r}, but the streams are {', '.join(names)}; name one of "
            "them"
        )
    missing = [name for name in names if "weight" not in mixture.get(name, {})]
    if missing:
        raise ValueError(
            f"the stream {missing[0]!r} has no weight, and its size is not known; set "
            f"mixture={{{missing[0]!r}: {{'weight': 1}}, …}} for every stream"
        )
    weights = {name: float(mixture[name]["weight"]) for name in names if mixture[name]["weight"]}
    if not weights:
        raise ValueError("mixture draws no document: every stream has a weight of 0")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def mixture_in_words(options: PackingOptions) -> str | None:
    """Return the weights of streams as text, None without a mixture."""
    mixture = options.mixture
    if not isinstance(mixture, dict):
        return None
    return ", ".join(f"{name} {share.get('weight', 0):g}" for name, share in mixture.items())


def join_streams(
    documents: Mapping[str, IterableDataset], shares: Mapping[str, float], seed: int
) -> IterableDataset:
    """Return one stream of the documents of several, with the column SOURCE.

    Args:
        documents: prepared, by the names of their sources.
        shares: of the documents that are drawn; a stream without one is left out.
        seed: decides the order in which streams are drawn.

    Raises:
        ValueError: documents of some streams have columns that those of others lack, or a stream
            has no documents.
    """
    streams = {name: documents[name] for name in shares}
    columns = {name: training_columns(stream) for name, stream in streams.items()}
    first = next(iter(columns))
    for name, found in columns.items():
        if set(found) != set(columns[first]):
            other = sorted(set(found) ^ set(columns[first]))[0]
            raise ValueError(
                f"only one of the streams {first!r} and {name!r} has the column {other!r}; give it "
                "to both, or to none"
            )
    try:
        return interleave_datasets(
            [
                stream.select_columns(columns[first]).map(_name_source, fn_kwargs={"source": name})
                for name, stream in streams.items()
            ],
            probabilities=[*shares.values()],
            seed=seed,
            stopping_strategy="all_exhausted",
        )
    except StopIteration:  # datasets 5.2 reads the first documents of each stream
        empty = next(name for name, stream in streams.items() if next(iter(stream), None) is None)
        raise ValueError(f"train_dataset[{empty!r}]: {NOTHING_TO_TRAIN}") from None
    except ValueError as error:
        if "features can't be aligned" not in str(error):  # datasets 5.2
            raise
        raise ValueError(
            f"a column of the streams has several types: {error}; give it one type in all streams"
        ) from error


def _name_source(document: Mapping[str, Any], source: str) -> dict[str, str]:
    return {SOURCE: source}
