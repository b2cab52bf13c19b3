"""The collator of a preview is the one that the run would have."""

import pytest

from trl_packing import PackedSFTConfig
from trl_packing.attention.backends import CHOICES, NATIVE_ATTENTION
from trl_packing.config import PackingOptions
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.preview.run_collator import _may_share


@pytest.mark.parametrize("attention", CHOICES)
def test_prefixes_are_shared_by_attention_that_takes_their_keys(attention, tmp_path):
    args = PackedSFTConfig(
        str(tmp_path), prefix_sharing="bin", attention=attention, use_cpu=True, bf16=False
    )
    shares = _may_share(PackingOptions.of(args), PackedCollator())
    assert shares == (attention not in NATIVE_ATTENTION)
