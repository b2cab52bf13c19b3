"""The model and processor with which most tests of images run."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from helpers.vision import tiny_processor, tiny_vision_model, vision_trainer

NAME = "qwen2_5_vl"


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny_processor(NAME)


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    return tiny_vision_model(NAME, processor)


@pytest.fixture
def trainer_of(model: Any, processor: Any, tmp_path: Any) -> Callable[..., Any]:
    return functools.partial(vision_trainer, model, processor, tmp_path)
