"""Loads the weights of a checkpoint into a model, on one process or several, or builds the model from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_llm.callbacks._torch import process_count
from lit_llm.checkpoint.adapters import saved_weights
from lit_llm.checkpoint.compatibility import saved_architecture, saved_model_config
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.shared_verification import verify_shards_together
from lit_llm.core.dtensor import fill_
from lit_llm.core.errors import UserError
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT
from lit_llm.models.lora import is_adapter


def load_model(checkpoint: Path, device: str = "cpu", *, base: Path | None = None, average: bool = False) -> GPT | CustomModel:
    """The trained model of a checkpoint, in fp32 and in eval mode. The class of a user's model is imported by its saved path.

    The adapters of a LoRA run are merged into its base weights.

    Args:
        base: the checkpoint of a LoRA run's base weights; None: the path that the run recorded.
        average: whether to load the moving average of the weights (EMA) instead of the weights.

    Raises:
        UserError: The checkpoint is missing, damaged or from another program; it has no average of the weights; its model
            class is missing or has changed.
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
        model.init_weights()  # fills the rotary tables, which no checkpoint holds
    weights = saved_weights(content, checkpoint, base=base, verify=True, average="--ema" if average else None)
    copy_weights(model.state_dict(), weights, f"{checkpoint} (--ckpt_path)")
    return model.eval()


def load_weights(model: nn.Module, checkpoint: Path, *, average: bool = False) -> None:
    """Copy a checkpoint's weights into a model, in the model's dtype. Of a DTensor, each rank copies its local part.

    The caller has verified the checkpoint. With several processes, its shards are verified here: all processes call this.
    From a checkpoint with adapters, the base weights with the adapters merged into them are copied. Adapters of `model` stay.

    Args:
        model: with pipeline parallelism, the whole model, with the layers of other ranks on the meta device.
        average: whether to load the moving average of the weights (EMA) instead of the weights.

    Raises:
        UserError: A shard is damaged, the weights do not fit `model`, or the base weights or the average are missing.
    """
    if process_count() > 1:
        verify_shards_together(checkpoint)
    own = {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}
    content, flag = read(checkpoint, verify=False, lazy=True), "--use_ema" if average else None
    saved = saved_weights(content, checkpoint, base_can_be_named=False, average=flag)
    copy_weights(own, saved, f"{checkpoint} (--init_from)")


def copy_weights(own: Mapping[str, Tensor], saved: Mapping[str, Any], source: str, *, strict: bool = True) -> None:
    """Copy each tensor of `saved` into the tensor of `own` with the same name.

    Args:
        own: tensors to fill. Tensors on the meta device belong to other ranks: their shapes are compared, they are not filled.
        saved: tensors, or `sharded.TensorOnDisk`, of which a rank reads only the part that its DTensor holds.
        source: for messages: the checkpoint of `saved`, and the flag that named the checkpoint.
        strict: whether `own` and `saved` must have the same names. False: names that only one of them has are skipped.

    Raises:
        UserError: Shapes differ, or with `strict`, names differ.
    """
    if problem := mismatch(own, saved, source, strict=strict):
        raise UserError(problem)
    for name in own.keys() & saved.keys():
        if not own[name].is_meta:
            fill_(own[name], saved[name] if isinstance(own[name], DTensor) else saved[name][...])


def mismatch(own: Mapping[str, Any], saved: Mapping[str, Any], source: str, *, strict: bool = True) -> str | None:
    """The first difference in names, shapes or dtypes between the model's tensors, `own`, and a checkpoint's, `saved`, as a
    sentence that names `source`; None if they fit. Without `strict`, only tensors with names in both are compared."""
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if strict and (missing or unexpected):
        return (
            f"the weights are not this model's: missing {missing[:3] or 'nothing'}, unexpected {unexpected[:3] or 'nothing'}, "
            f"in {source}"
        )
    for name in sorted(own.keys() & saved.keys()):
        here, there = tuple(own[name].shape), tuple(saved[name].shape)
        if here != there:
            return f"{name} does not fit this model: it has shape {there} and the model's has {here}, in {source}"
        dtype = saved[name].dtype  # weights of 8 bits need a scale, which is in another tensor
        if own[name].is_floating_point() != dtype.is_floating_point or (dtype.is_floating_point and dtype.itemsize == 1):
            return f"{name} does not fit this model: it has {saved[name].dtype}, the model {own[name].dtype}, in {source}"
    return None
