"""A trained model from a checkpoint alone."""

from __future__ import annotations

from pathlib import Path

import torch

from lit_llm.checkpoint.adapters import saved_weights
from lit_llm.checkpoint.compatibility import saved_architecture, saved_model_config
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import copy_weights
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def load_model(checkpoint: Path, device: str = "cpu", *, base: Path | None = None, average: bool = False) -> GPT | CustomModel:
    """The trained model of a checkpoint, in fp32 and in eval mode. A model class of the user is imported by its saved path.

    The adapters of a LoRA run are merged into its base weights.

    Args:
        base: Where the base weights of a LoRA run are; None: where they were in training.
        average: the average of the weights, which EMA keeps, instead of the weights.

    Raises:
        UserError: The checkpoint is missing, damaged or another program's, or has no average; or its model class is missing or
            has changed.
    """
    content = read(checkpoint)
    config = saved_model_config(content, checkpoint, "--ckpt_path")
    architecture = saved_architecture(content)
    model: GPT | CustomModel
    if architecture is not None:
        model = CustomModel(config, architecture).to(device)
    else:
        with torch.device("meta"):
            model = GPT(config)
        model.to_empty(device=device)
        model.init_weights()  # fills what no checkpoint holds: the rotary tables
    weights = saved_weights(content, checkpoint, base=base, verify=True, average="--ema" if average else None)
    copy_weights(model.state_dict(), weights, f"{checkpoint} (--ckpt_path)")
    return model.eval()
