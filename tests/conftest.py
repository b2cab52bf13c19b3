"""What every test shares: no network, one thread, and reasons for what is skipped."""

import gc
import os

# Before transformers and datasets are imported: both read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
datasets.disable_progress_bars()

# No test depends on time: hypothesis fails an example beyond 200 ms, which a busy machine exceeds.
hypothesis.settings.register_profile("trl_packing", deadline=None, print_blob=True)
hypothesis.settings.load_profile("trl_packing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, saying so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep what the imports left out of later collections: each `train()` runs one, of 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
