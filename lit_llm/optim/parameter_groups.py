"""Parameter groups by role: hidden matrices, embeddings, vectors."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_llm.core.errors import UserError

GROUPS = ("matrix", "projection", "experts", "embedding", "head", "vector", "adapter")


def parameter_groups(model: nn.Module, **overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters by role into groups for an optimizer, each with ``name``, ``params`` and options.

    Each parameter is in one group. Empty groups are left out. The groups are:

    * ``embedding``: weights of ``nn.Embedding`` modules and of every module called ``head``, tied or not;
    * ``adapter``: ``lora_a`` and ``lora_b``, to which Muon does not apply: LoRA's published rates are AdamW's, and Muon would
      orthogonalise each factor, not the update that is their product;
    * ``matrix``: every other tensor of at least 2 dimensions, i.e. the hidden weights;
    * ``projection`` and ``head``: only if the model has `size_ratios` (GPTConfig.base_width), which give these groups other
      rates: parameters of ``matrix`` in modules called ``project``, and of ``embedding`` in modules called ``head``;
    * ``experts``: weights of modules with `is_stacked`, whose shape (E, r, c) stands for E matrices;
    * ``vector``: all other parameters, such as biases and norm gains. This group's ``weight_decay`` is 0.

    Args:
        overrides: name of a group → options of this group, e.g. ``embedding={"lr": 3e-4}``.

    Raises:
        UserError: an override names an unknown group.
    """
    if unknown := sorted(overrides.keys() - set(GROUPS)):
        raise UserError(f"parameter group {unknown[0]!r} does not exist: the groups are {', '.join(GROUPS)}.")
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    # By default named_parameters yields a shared tensor once, under its first name. A tied head is found by its other name.
    embeddings |= {p for name, p in model.named_parameters(remove_duplicate=False) if "head" in name.split(".")}
    stacked = {p for module in model.modules() if getattr(module, "is_stacked", False) for p in module.parameters()}
    split = getattr(model, "size_ratios", None) is not None
    for name, p in model.named_parameters():
        if p.requires_grad:
            *modules, last = name.split(".")
            is_adapter = last in ("lora_a", "lora_b")
            role = "adapter" if is_adapter else "vector" if p.ndim < 2 else "embedding" if p in embeddings else "matrix"
            if p in stacked and not is_adapter:
                role = "vector" if last == "bias" else "experts"
            if split and role == "embedding" and "head" in modules:
                role = "head"
            if split and role == "matrix" and "project" in modules:
                role = "projection"
            groups[role].append(p)
    options: dict[str, dict[str, Any]] = {"vector": {"weight_decay": 0.0}}
    return [
        {"name": name, "params": params} | options.get(name, {}) | overrides.get(name, {})
        for name, params in groups.items()
        if params
    ]
