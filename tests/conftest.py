"""Settings of all tests: no network, one thread, reasons for skipped tests, a fixed seed."""

import functools
import gc
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from hashlib import md5

# Before transformers and datasets are imported: both read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny tensors: a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Data sets read from files would leave thousands of lock files in the user's cache. The workers of
# pytest-xdist, and processes that tests start, inherit this folder.
os.environ["HF_DATASETS_CACHE"] = (
    os.environ["HF_DATASETS_CACHE"]
    if "PYTEST_XDIST_WORKER" in os.environ
    else tempfile.mkdtemp(prefix="trl_packing_tests_")
)

import accelerate.logging
import accelerate.utils.imports
import datasets
import hypothesis.internal.conjecture.providers as hypothesis_draws
import numpy as np
import pytest
import torch
import tqdm
from hypothesis import HealthCheck, settings
from transformers.utils import logging as transformers_logging

DATASETS_CACHE = os.environ["HF_DATASETS_CACHE"]
# Some warnings of torch come once a process; the test that fails would depend on the order.
torch.set_warn_always(True)
datasets.disable_progress_bars()
# No thread that watches bars: after the first bar, Python 3.12 would warn of every fork.
tqdm.tqdm.monitor_interval = 0

# accelerate reads the metadata of peft and DeepSpeed in each run several times: 8% of a tiny one.
accelerate.utils.imports._is_package_available = functools.cache(
    accelerate.utils.imports._is_package_available
)

# datasets names each table by a hash of what dill, written in Python, makes of it: 7% of the tests.
datasets.arrow_dataset.generate_fingerprint = lambda d: md5(pickle.dumps(vars(d))).hexdigest()
# torch notes the stack of each seed that it keeps for a CUDA device to come.
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = lambda seed: None

# Properties are tested on the same examples in each run, and a busy machine may take its time.
# `--hypothesis-profile=search` draws others.
settings.register_profile(
    "trl_packing",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("search", settings.get_profile("trl_packing"), derandomize=False)
settings.load_profile("trl_packing")
# Among its examples are constants of the modules that happen to be imported: of none here.
hypothesis_draws._get_local_constants = lambda: hypothesis_draws._local_constants


def pytest_unconfigure() -> None:
    """Remove the cache of data sets at the end of the session."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(DATASETS_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device, with that reason."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Exempt what earlier modules have imported from garbage collection, which each `train()` runs.

    It would take 30 milliseconds once 70 architectures are imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print to a terminal of 100 columns: pytest-xdist tells its workers that they have 80."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """Give back the levels of the logs: commands run inside a test make libraries quiet."""
    levels = transformers_logging.get_verbosity(), datasets.logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(levels[0])
    datasets.logging.set_verbosity(levels[1])


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    """Forget which warnings came before: a library that warns once would leave out this test's."""
    for logger in (accelerate.logging.MultiProcessAdapter, logging.Logger):
        logger.warning_once.cache_clear()


@pytest.fixture(autouse=True)
def _compiled_nothing() -> None:
    """Forget graphs of other tests: Dynamo keeps eight a function, and which sizes varied."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        dynamo.reset()
        dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random states."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
