"""The weights of a model: their shapes, counted by part and by group of the optimizer.

They are those of the built model, of which one block is built, without memory; all blocks have equal shapes.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from lit_llm.models.config import GPTConfig
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.weights import Key, Weight

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig

PARTS = (
    "token embedding",
    "position embedding",
    "attention",
    "convolutions",
    "mlp",
    "norms",
    "biases",
    "adapters",
    "output head",
)


def weights_of(model: GPTConfig, lora: LoRAConfig | None = None, ranks: int = 1) -> tuple[Weight, ...]:
    """The parameters on one of `ranks` tensor-parallel ranks, in the model's order. A tied head is the token embedding."""
    return _weights(Key(model), Key(lora), ranks)


@lru_cache(maxsize=256)
def _weights(model: Key, lora: Key, ranks: int) -> tuple[Weight, ...]:
    from lit_llm.optim import parameter_groups
    from lit_llm.plan.model import build, local_config, with_layers

    config: GPTConfig = model.value
    if isinstance(config, CustomConfig):
        from lit_llm.plan import custom_model

        return custom_model.weights(config)
    built = build(with_layers(local_config(config, ranks), [0]), lora.value)
    alike = {"projection": "matrix", "head": "embedding"}  # they differ in their rates only
    groups = {id(p): alike.get(name := str(group["name"]), name) for group in parameter_groups(built) for p in group["params"]}
    return tuple(
        Weight(name, tuple(p.shape), _part(name), groups.get(id(p)), config.n_layer if name.startswith("blocks.") else 0)
        for name, p in built.named_parameters()
    )


def _part(name: str) -> str:
    first, *_, last = name.split(".")
    if "lora" in last:
        return "adapters"
    if "norm" in name:
        return "norms"
    if "convolution" in name:
        return "convolutions"
    if last == "bias":
        return "biases"
    outside = {"embedding": "token embedding", "positions": "position embedding", "head": "output head"}
    return outside.get(first, "attention" if ".attention." in name else "mlp")


def parameters(model: GPTConfig, lora: LoRAConfig | None = None) -> dict[str, int]:
    """Parameters by part, exactly as in the built model. A tied head is counted with the embedding.

    A Llama-like block with multi-head attention, no biases, a 2-matrix MLP and f = 4d has 12d² + 2d parameters. The whole
    model with a tied head has 12Ld² + 2Ld + Vd + d (Kaplan et al. 2020, table 1, plus norms).
    """
    found = Counter[str]()
    for weight in weights_of(model, lora):
        found[weight.part] += weight.total
    return {part: found[part] for part in dict.fromkeys((*PARTS, *found)) if found[part]}


def total_parameters(model: GPTConfig, lora: LoRAConfig | None = None, ranks: int = 1) -> int:
    """All parameters, or those on one of `ranks` tensor-parallel ranks. A tied matrix counts once.

    Matrices, the biases of their output columns, embedding and head are split. Norms, positions and the biases of the two
    output projections are not.
    """
    return sum(weight.total for weight in weights_of(model, lora, ranks))
