"""The model and processor with which most tests of images run."""

from typing import Any

import pytest
from helpers.vision import tiny_processor, tiny_vision_model

NAME = "qwen2_5_vl"


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny_processor(NAME)


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    return tiny_vision_model(NAME, processor)
