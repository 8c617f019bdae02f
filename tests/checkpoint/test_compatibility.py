"""Checkpoints that are older than a setting."""

from dataclasses import asdict

import pytest

from lit_llm.checkpoint.compatibility import model_changes
from lit_llm.models.gpt import GPTConfig


@pytest.mark.parametrize("name", ["base_width", "qkv_convolution"])
def test_a_setting_that_the_checkpoint_has_is_compared(name):
    saved = asdict(GPTConfig(**{name: 4}))
    assert len(model_changes(saved, GPTConfig(), None, accepted=False)) == 1
