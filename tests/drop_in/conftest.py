"""A tiny model in a folder, for tests that pass a model id."""

import pytest
from helpers.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model_id(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models"), "qwen2")
