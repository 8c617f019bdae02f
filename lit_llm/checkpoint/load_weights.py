"""A checkpoint's weights into a model that has just been built, on one process or on a mesh of them."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.tensor import DTensor

from lit_llm.checkpoint.format import read
from lit_llm.model import GPT
from lit_llm.sharding import fill_


def load_weights(model: GPT, checkpoint: Path) -> None:
    """Copy a checkpoint's weights into a model, each rank its part of what is distributed, in the model's dtype.

    Raises:
        ValueError: they are not this model's.
    """
    saved = read(checkpoint, verify=False, lazy=True)["state_dict"]
    saved = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(
            f"the weights in {checkpoint} are not this model's: they lack {missing[:3] or 'nothing'}, and have "
            f"{unexpected[:3] or 'nothing'} besides (--init_from)"
        )
    for name, tensor in own.items():
        try:  # what is in shards on disk is read in parts where it is needed in parts
            fill_(tensor, saved[name] if isinstance(tensor, DTensor) else saved[name][...])
        except ValueError as error:
            raise ValueError(f"{name} in {checkpoint} does not fit this model: {error} (--init_from)") from None
