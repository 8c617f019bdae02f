import numpy as np
import pytest
from recorder import TOKENS, T, write

from lit_llm.data import TokenShards


@pytest.fixture
def shards(tmp_path):
    """Token i of the training stream is i, so a batch shows where it was read."""
    write(tmp_path, "train", np.arange(TOKENS))
    write(tmp_path, "val", np.arange(500, 500 + 30))

    def make(**arguments):
        defaults = {
            "train": str(tmp_path / "train_*.bin"),
            "val": str(tmp_path / "val_*.bin"),
            "vocab_size": 1000,
            "block_size": T,
            "global_batch_size": 6,
            "seed": 3,
        }
        return TokenShards(**(defaults | arguments))

    return make
