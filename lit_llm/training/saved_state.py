"""The entries that lit_llm adds to a LanguageModel's checkpoint, and the checks before a checkpoint is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lit_llm.checkpoint.adapters import BASE, LORA, averaged
from lit_llm.checkpoint.compatibility import model_settings
from lit_llm.checkpoint.load_weights import mismatch
from lit_llm.core.errors import UserError
from lit_llm.models.lora import is_adapter
from lit_llm.runs.saved_run import PROMPT_START, TOKENIZER_SHA256

REFERENCE = "reference"
"""Key in the checkpoint of a preference run: a text that identifies the weights with which training started."""


def add_entries(module: Any, checkpoint: dict[str, Any]) -> None:
    """Add lit_llm's entries to a checkpoint that Lightning is about to save. With LoRA, remove all weights but the adapters."""
    checkpoint["state_dict"] = saved_weights(module, checkpoint["state_dict"])
    if module.lora is not None:
        checkpoint |= {LORA: asdict(module.lora), BASE: module.base}
    checkpoint["model_config"] = model_settings(module.config, module.architecture)  # plain values: loading stays weights_only
    checkpoint[PROMPT_START] = module.prompt_start
    checkpoint["optimizer_class"] = class_name(module.trainer.optimizers[0])
    if module.tokenizer is not None:
        checkpoint[TOKENIZER_SHA256] = module.tokenizer_sha256
    if module.reference.is_stored(module):
        checkpoint[REFERENCE] = module.reference.weights
    data: Any = getattr(module.trainer, "datamodule", None)
    if hasattr(data, "consumed_samples"):
        checkpoint["tokens"] = data.consumed_samples * data.block_size  # for the manifest


def check_entries(module: Any, checkpoint: dict[str, Any]) -> None:
    """Check, before a checkpoint is loaded, that its weights fit the module: a custom architecture's code may have changed.

    With `use_ema`, an evaluation first replaces the checkpoint's weights by their moving average. For a preference objective,
    `module.reference.weights` is set to the text that identifies the weights at the start of the run.

    Raises:
        UserError: the weights do not fit, or the checkpoint of a preference run lacks that text.
    """
    if module.use_ema and module.trainer.state.fn != "fit":
        checkpoint["state_dict"] = averaged(checkpoint, Path(str(module.trainer.ckpt_path)), "--use_ema")
    state = module.state_dict() | module.whole_model.state_dict(prefix="model.")  # in a pipeline, also layers of other ranks
    own, what = saved_weights(module, state), "the checkpoint"
    if module.lora is not None:
        what = "the checkpoint of adapters (--lora)"
    elif module.architecture is not None:
        what = f"the checkpoint of {module.architecture.class_path}"
    if problem := mismatch(own, checkpoint["state_dict"], what):
        raise UserError(problem)
    if module.reference.is_stored(module):
        if not isinstance(weights := checkpoint.get(REFERENCE), str):
            raise UserError("the checkpoint was trained without a reference: start from its weights instead (--init_from)")
        module.reference.weights = weights


def saved_weights(module: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The entries of `state` that a checkpoint stores: with LoRA only the adapters, else all."""
    return state if module.lora is None else {name: tensor for name, tensor in state.items() if is_adapter(name)}


def class_name(thing: object) -> str:
    """The dotted path of an object's class, such as torch.optim.adamw.AdamW."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def keep_configured_options(optimizer: Optimizer, saved: dict[str, Any], *, rates: bool = False) -> dict[str, Any]:
    """A hook for `Optimizer.load_state_dict`: returns `saved` with the configured options, such as weight decay, in its groups.

    `RunStart.setting_changes` says which options differ.

    Args:
        rates: whether learning rates are the configured ones, too. If not, they are the checkpoint's: a schedule reads these
            and then sets its own.

    Raises:
        UserError: the state does not fit the optimizer's parameters.
    """
    of_checkpoint = ("params",) if rates else ("params", "lr")
    groups: list[dict[str, Any]] = []
    if problem := _state_problem(optimizer, saved):
        raise UserError(f"the optimizer's state in the checkpoint {problem} (--resume)")
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=False):  # torch refuses another number
        options = {name: value for name, value in own.items() if name not in of_checkpoint}
        groups.append({**theirs, **options})
    return {**saved, "param_groups": groups + saved["param_groups"][len(groups) :]}


_OF_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Names of tensors in the state of a parameter that have the parameter's shape, in optimizers of torch, torchao and lit_llm."""


def _state_problem(optimizer: Optimizer, saved: dict[str, Any]) -> str | None:
    """Why a saved state_dict does not fit the optimizer's parameters, as the end of a sentence; None if it fits.

    torch itself compares only the number of parameters.
    """
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "torchao", "lit_llm"):
        return None  # other optimizers may keep a number for each layer, or a low-rank moment, under these names
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        state = saved["state"].get(number, {})
        for name in (name for name in ("step", *_OF_PARAMETER) if name in state):
            value: Any = state[name]
            shape = () if name == "step" else tuple(parameter.shape)
            if not isinstance(value, torch.Tensor | int | float | None):
                return f"has {name} {str(value)[:40]!r} for parameter {number}"
            if value is not None and tuple(getattr(value, "shape", ())) != shape:
                return f"has {name} of another shape than {shape}, for parameter {number}"
            if name == "step" and type(value) in (int, float, torch.Tensor) and not state[name] >= 0:
                return f"has step {float(state[name]):g} for parameter {number}"
    # A parameter without a gradient so far has no state. Adafactor's state has other names for other numbers of dimensions.
    ndims = dict(zip(numbers, (parameter.ndim for parameter in parameters), strict=False))
    for group in saved["param_groups"]:
        states = [(ndims.get(number), saved["state"].get(number)) for number in group["params"]]
        names = {(ndim, *sorted(map(str, state))) for ndim, state in states if state}
        if len({ndim for ndim, *_ in names}) < len(names):
            return "is incomplete: restore it, or use another one"
    return None
