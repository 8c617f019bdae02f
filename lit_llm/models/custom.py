"""Custom models in recipes: the group `architecture`, and a wrapper that gives a user's module the interface of `GPT`."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_llm.core.dtensor import fill_
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import as_flag
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossSums, cross_entropy_of_logits
from lit_llm.models.router import Router

SETTINGS = ("block_size", "vocab_size", "eos_id")
"""Settings of `GPTConfig` that apply to every architecture."""


@dataclass(frozen=True)
class Architecture:
    """Your own class instead of `GPT`: ``architecture: {class_path: mine.LSTMModel, init_args: {width: 64}}`` in a recipe.

    The class must satisfy this contract:

    * It is a ``torch.nn.Module`` with ``__init__(self, vocab_size: int, ...)``. ``vocab_size`` comes from the data. All further
      arguments come from ``init_args`` as plain values (numbers, text, lists, dicts), because every checkpoint stores them.
    * ``forward(input_ids)`` takes (B, T) int64, T at most ``model.block_size``, and returns (B, T, vocab_size) logits. The
      logits at a position depend only on ids up to that position (the command `check` tests this).
    * ``blocks`` is optional, an ``nn.ModuleList``. FSDP2, activation checkpointing, compile and float8 work on each block.
      Without ``blocks``, FSDP2 gathers the whole model at once, and the other three features are refused.

    ``__init__`` draws the initial weights, on the CPU and equal on all ranks. `parameter_groups` sorts the parameters:
    ``nn.Embedding`` and modules called ``head`` are embeddings, other tensors with two dimensions are matrices (Muon, weight
    decay).
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parsed: Any) -> Architecture | None:
        """Make the Architecture from a recipe's parsed group, a namespace of `class_path` and `init_args`. None gives None."""
        if parsed is None:
            return None
        values = parsed.as_dict()
        return cls(values["class_path"], values.get("init_args") or {})

    def load(self) -> type[nn.Module]:
        """Import and return the class.

        Raises:
            UserError: the class does not exist or breaks the contract.
        """
        module, _, name = self.class_path.rpartition(".")
        if not module or module.startswith("."):
            raise UserError(
                f"architecture is {self.class_path!r}. Expected a dotted class path such as my_project.MyModel "
                "(--architecture)."
            )
        try:
            module_class = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"architecture {self.class_path} was not found: {error}. Python searches the current folder first "
                "(--architecture)."
            ) from None
        if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
            raise UserError(f"architecture {self.class_path} is not a torch.nn.Module (--architecture).")
        if any(base.__name__ == "LightningModule" for base in module_class.__mro__):  # of lightning or of pytorch_lightning
            raise UserError(
                f"architecture is {self.class_path}, a LightningModule: a recipe trains a torch.nn.Module with lit_llm's loss "
                "and optimizer; use lit_llm's callbacks in your own Trainer instead (docs/your-project.md), or name a "
                "torch.nn.Module (--architecture)."
            )
        if "vocab_size" not in inspect.signature(module_class).parameters:
            raise UserError(
                f"architecture {self.class_path} needs an __init__ argument vocab_size; its value comes from the data "
                "(--architecture)."
            )
        return module_class

    def build(self, vocab_size: int, device: str = "cpu") -> nn.Module:
        """Build and return the module.

        Raises:
            UserError: the class does not exist, breaks the contract, refuses its arguments, or has no forward.
        """
        cls = self.load()
        try:
            inspect.signature(cls).bind(vocab_size=vocab_size, **self.init_args)
        except TypeError as error:
            raise UserError(
                f"architecture {self.class_path} does not accept its init_args: {error} (--architecture)."
            ) from None
        try:
            with torch.device(device):
                module = cls(vocab_size=vocab_size, **self.init_args)
        except ValueError as error:  # the class refuses a value. Other errors are bugs, and keep their traceback.
            if device == "meta":
                raise  # the reason may be the device
            raise UserError(f"architecture {self.class_path} cannot be built: {error} (--architecture)") from error
        if getattr(module.forward, "__func__", None) is nn.Module.forward and cls.__call__ is nn.Module.__call__:
            raise UserError(
                f"architecture {self.class_path} has no forward, which must map input_ids (B, T) to logits (B, T, vocab_size) "
                "(--architecture)."
            )
        return module

    def problems(self, model: GPTConfig, chunk_size: int | None, compute: Any) -> list[str]:
        """Return every reason known without the data why a recipe cannot train this architecture, one sentence each.

        `chunk_size` is the recipe's `loss.chunk_size`, and `compute` its `ComputeConfig`.
        """
        problems = []
        try:
            self.load()
        except UserError as error:
            problems.append(str(error))
        for name, value in self.init_args.items():
            if isinstance(value, dict) and "class_path" in value:
                problems.append(
                    f"architecture.{name} is a class, but init_args must be plain values: pass a name and build the class in "
                    f"{self.class_path} (--architecture.{name})"
                )
        try:
            json.dumps(self.init_args)
        except TypeError as error:
            problems.append(
                f"architecture.init_args must be plain values, because checkpoints store them: {error} (--architecture)"
            )
        for setting in fields(GPTConfig):
            value = getattr(model, setting.name)
            if setting.name not in SETTINGS and value != setting.default:
                problems.append(
                    f"model.{setting.name} is {value}, but {self.class_path} does not read it: use architecture.init_args "
                    f"and remove model.{setting.name} "
                    f"(--model.{setting.name} {as_flag(setting.default)})"
                )
        if chunk_size is not None:
            problems.append(
                f"loss.chunk_size is {chunk_size}, but {self.class_path} returns all logits at once: only lit_llm's GPT "
                "supports chunks (--loss.chunk_size null)"
            )
        if compute.activation_checkpointing == "attention":
            problems.append(
                f"compute.activation_checkpointing attention supports lit_llm's GPT, not {self.class_path} "
                "(--compute.activation_checkpointing full, cheap or a number)"
            )
        if compute.attention != "auto":
            problems.append(
                f"compute.attention is {compute.attention}, but {self.class_path} computes attention itself "
                "(--compute.attention auto)"
            )
        return problems


def blocks_problem(class_path: str, names: list[str]) -> str:
    """Return a sentence: why the settings `names`, which apply to blocks, cannot be used with a model without blocks."""
    verb = "need" if len(names) > 1 else "needs"
    return (
        f"{' and '.join(names)} {verb} the model's blocks, but {class_path} has none: name the nn.ModuleList of its "
        f"layers `blocks`, or remove --{names[0]}"
    )


def architecture_layout_problems(class_path: str, tensor_parallel: int, context: int) -> list[str]:
    """Return one sentence for each size that is above 1: custom models support neither tensor nor context parallelism."""
    sizes = {"tensor_parallel": tensor_parallel, "context": context}
    return [
        f"{name}={size} works with lit_llm's GPT only, not with {class_path}; use shards "
        f"instead (--trainer.strategy.{name} 1, --config recipes/strategy/fsdp2.yaml)"
        for name, size in sizes.items()
        if size > 1
    ]


def class_problem(key: str, value: Any) -> str | None:
    """Return why the class path `value` of the setting `key` cannot be used; None if it can, if `key` is not "architecture", or
    if `value` is not text."""
    if key != "architecture" or not isinstance(value, str):
        return None
    try:
        Architecture(value).load()
    except UserError as error:
        return str(error)
    return None


class CustomModel(nn.Module):
    """Gives a user's module the interface of `GPT`: with targets, it returns `LossSums`. Parameter names begin with `network`.

    Raises:
        UserError: the vocabulary size is unknown, the module cannot be built, or its `blocks` is not an nn.ModuleList.
    """

    vocabulary_shards = None  # no tensor parallelism
    routers: ClassVar[list[Router]] = []  # no experts

    def __init__(self, config: GPTConfig, architecture: Architecture, device: str = "cpu") -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is null, and there is no data to take it from (--model.vocab_size)")
        self.config, self.architecture, self.vocab_size = config, architecture, config.vocab_size
        self.network = architecture.build(config.vocab_size, device)
        blocks = getattr(self.network, "blocks", None)
        if blocks is not None and not isinstance(blocks, nn.ModuleList):
            raise UserError(
                f"{architecture.class_path}.blocks is a {type(blocks).__name__}, but must be an nn.ModuleList; rename "
                "it if it is something else (--architecture)."
            )

    @property
    def blocks(self) -> nn.ModuleList:
        """The attribute `blocks` of the user's module; an empty list if the module has no blocks."""
        blocks = getattr(self.network, "blocks", None)
        return nn.ModuleList() if blocks is None else blocks

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loss: Callable[[Tensor, Tensor], LossSums] = cross_entropy_of_logits,
    ) -> Tensor | LossSums:
        """Return logits, or with targets the sums of the loss.

        Args:
            input_ids: (B, T) int64.
            targets: (B, T) int64, the id that follows each position; -100 is ignored.
            loss: `lit_llm.models.loss.cross_entropy_of_logits`, with settings bound by `functools.partial`.

        Returns:
            Without targets (B, T, V) logits in at least fp32; with targets `LossSums` over all targets that are not ignored.

        Raises:
            UserError: the module returns something other than floating-point logits (B, T, V).
        """
        z = self.network(input_ids)  # (B, T, V)
        wanted = (*input_ids.shape, self.vocab_size)
        if not isinstance(z, Tensor) or z.shape != wanted or not z.is_floating_point():
            seen = f"{z.dtype} of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise UserError(
                f"{self.architecture.class_path} returns {seen} for input_ids of shape {tuple(input_ids.shape)}, but must "
                f"return logits of shape {wanted}: batch, positions, vocabulary (--architecture)."
            )
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z if targets is None else loss(z, targets)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set parameters and buffers to the values of a newly built module."""
        fresh = self.architecture.build(self.vocab_size)
        values = dict([*fresh.named_parameters(), *fresh.named_buffers()])
        for name, tensor in [*self.network.named_parameters(), *self.network.named_buffers()]:
            fill_(tensor, values[name])

    def num_parameters(self) -> int:
        """Number of parameters. A shared parameter counts once."""
        return sum(p.numel() for p in self.parameters())
