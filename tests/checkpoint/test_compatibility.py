"""Checkpoints that are older than a setting."""

from dataclasses import asdict

import pytest

from lit_llm.checkpoint.compatibility import model_changes
from lit_llm.models.gpt import GPTConfig


def test_a_setting_that_an_older_checkpoint_lacks_was_off():
    new = ("input_convolution", "exclusive_attention")
    saved = {name: value for name, value in asdict(GPTConfig()).items() if name not in new}
    assert model_changes(saved, GPTConfig(), None, accepted=False) == []
    recipe = GPTConfig(input_convolution=4, exclusive_attention=True)
    shapes = (
        "model.input_convolution was None in the checkpoint and is 4: these weights do not fit (--model.input_convolution None)"
    )
    computed = (
        "model.exclusive_attention was False in the checkpoint and is True (--model.exclusive_attention False, or "
        "--accept_changes true)"
    )
    assert model_changes(saved, recipe, None, accepted=False) == [shapes, computed]
    assert model_changes(saved, recipe, None, accepted=True) == [shapes]


@pytest.mark.parametrize("name", ["base_width", "qkv_convolution"])
def test_a_setting_that_the_checkpoint_has_is_compared(name):
    saved = asdict(GPTConfig(**{name: 4}))
    assert len(model_changes(saved, GPTConfig(), None, accepted=False)) == 1
