"""The collator of a preview is the one that the run would have."""

import pytest
from datasets import Dataset
from helpers.tiny import tiny_tokenizer

from trl_packing.attention.backends import CHOICES, NATIVE_ATTENTION
from trl_packing.tools.preview.preview import collator_of
from trl_packing.tools.preview.previewed_run import PreviewedRun


@pytest.mark.parametrize("attention", CHOICES)
def test_prefixes_are_shared_by_attention_that_takes_their_keys(attention):
    settings = ["--prefix_sharing", "bin", "--attention", attention]
    run = PreviewedRun.from_settings(
        Dataset.from_list([{"text": "So."}]), tiny_tokenizer(), settings
    )
    assert collator_of(run, None).shares_prefixes == (attention not in NATIVE_ATTENTION)
