"""A model of one's own in a recipe: the group `architecture`, and what stands between such a class and the training step."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_llm.dtensor import fill_
from lit_llm.errors import UserError
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossSums, cross_entropy_of_logits

if TYPE_CHECKING:
    from lit_llm.distributed.compute_config import ComputeConfig

SETTINGS = ("block_size", "vocab_size", "eos_id")
"""Of `GPTConfig`, what means something for every architecture."""


@dataclass(frozen=True)
class Architecture:
    """A class of yours in place of `GPT`: ``architecture: {class_path: mine.LSTMModel, init_args: {width: 64}}`` in a recipe.

    The whole contract:

    * It is a ``torch.nn.Module`` with ``__init__(self, vocab_size: int, ...)``. ``vocab_size`` comes from the data, the rest
      from ``init_args``, in plain values (numbers, text, lists, dicts): they are kept in every checkpoint.
    * ``forward(input_ids)`` takes (B, T) int64, T at most ``model.block_size``, and returns (B, T, vocab_size) logits; those at
      a position depend on ids up to it and on none after it (`check` tries that).
    * Optionally ``blocks``, an ``nn.ModuleList``: what FSDP2, activation checkpointing, compile and float8 work on one by one.
      Without it FSDP2 gathers the whole model at once, and the other three are refused.

    The first weights are those that ``__init__`` draws, on the CPU, alike on all ranks. `optimizers.parameter_groups` sorts
    them: ``nn.Embedding`` and what is called ``head`` are embeddings, what else has two dimensions is a matrix (Muon,
    weight decay).
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parsed: Any) -> Architecture | None:
        """From the parsed group, a namespace of `class_path` and `init_args` or None."""
        if parsed is None:
            return None
        values = parsed.as_dict()
        return cls(values["class_path"], values.get("init_args") or {})

    def load(self) -> type[nn.Module]:
        """The class.

        Raises:
            UserError: there is none of that name, or it is not what the contract says.
        """
        module, _, name = self.class_path.rpartition(".")
        if not module:
            raise UserError(f"architecture {name} is no class path, which is like module.Class (--architecture)")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"architecture {self.class_path} is not found: {error}; Python looks in the current folder first "
                "(--architecture)"
            ) from None
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise UserError(f"architecture {self.class_path} is no torch.nn.Module (--architecture)")
        if "vocab_size" not in inspect.signature(found).parameters:
            raise UserError(
                f"architecture {self.class_path} takes no vocab_size: it must be an argument of __init__, whose value comes "
                "from the data (--architecture)"
            )
        return found

    def build(self, vocab_size: int) -> nn.Module:
        """The module on the CPU, as its `__init__` leaves it.

        Raises:
            UserError: as `load`; or the arguments are not those of the class.
        """
        cls = self.load()
        try:
            inspect.signature(cls).bind(vocab_size=vocab_size, **self.init_args)
        except TypeError as error:
            raise UserError(f"architecture {self.class_path} does not take its init_args: {error} (--architecture)") from None
        with torch.device("cpu"):
            return cls(vocab_size=vocab_size, **self.init_args)

    def problems(self, model: GPTConfig, chunk_size: int | None, compute: ComputeConfig) -> list[str]:
        """Every reason why a recipe cannot train it, one sentence each, as far as that is known before the data are."""
        found = []
        try:
            self.load()
        except UserError as error:
            found.append(str(error))
        for name, value in self.init_args.items():
            if isinstance(value, dict) and "class_path" in value:
                found.append(
                    f"architecture.{name} is a class, and init_args are plain values: build it in {self.class_path}, by a name "
                    f"(--architecture.{name})"
                )
        try:
            json.dumps(self.init_args)
        except TypeError as error:
            found.append(f"architecture.init_args must be plain values to be kept in checkpoints: {error} (--architecture)")
        for setting in fields(GPTConfig):
            value = getattr(model, setting.name)
            if setting.name not in SETTINGS and value != setting.default:
                found.append(
                    f"model.{setting.name} is {value}, which {self.class_path} never sees: give it through "
                    f"architecture.init_args and leave model.{setting.name} out "
                    f"(--model.{setting.name} {_as_flag(setting.default)})"
                )
        if chunk_size is not None:
            found.append(
                f"loss.chunk_size is {chunk_size}, but {self.class_path} returns all logits at once: only lit_llm's own model "
                "leaves the last matrix to the loss (--loss.chunk_size null)"
            )
        if compute.activation_checkpointing == "attention":
            found.append(
                f"compute.activation_checkpointing attention knows the attention of lit_llm's own model, not that of "
                f"{self.class_path} (--compute.activation_checkpointing full, cheap or a number)"
            )
        return found


def class_problem(key: str, value: Any) -> str | None:
    """What is wrong with the class that the group `architecture` names; None for other keys, and if nothing is."""
    if key != "architecture" or not isinstance(value, str):
        return None
    try:
        Architecture(value).load()
    except UserError as error:
        return str(error)
    return None


def _as_flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class CustomModel(nn.Module):
    """Makes of a user's module what the LightningModule trains: logits become `LossSums`. It is `network` in names of weights.

    Raises:
        UserError: the vocabulary is not known, the module cannot be built, or its `blocks` are no ModuleList.
    """

    vocabulary_shards = None  # is never split over ranks

    def __init__(self, config: GPTConfig, architecture: Architecture) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is null and no data gave it (--model.vocab_size)")
        self.config, self.architecture, self.vocab_size = config, architecture, config.vocab_size
        self.network = architecture.build(config.vocab_size)
        blocks = getattr(self.network, "blocks", None)
        if blocks is not None and not isinstance(blocks, nn.ModuleList):
            raise UserError(
                f"{architecture.class_path}.blocks is a {type(blocks).__name__}, it must be an nn.ModuleList, or be called "
                "otherwise (--architecture)"
            )

    @property
    def blocks(self) -> nn.ModuleList:
        """The network's, empty if it has none."""
        blocks = getattr(self.network, "blocks", None)
        return nn.ModuleList() if blocks is None else blocks

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loss: Callable[[Tensor, Tensor], LossSums] = cross_entropy_of_logits,
    ) -> Tensor | LossSums:
        """Logits, or the sums that a loss is made of.

        Args:
            input_ids: (B, T) int64.
            targets: (B, T) int64, the id that follows each position; -100 is not counted.
            loss: `lit_llm.models.loss.cross_entropy_of_logits`, with settings bound by `functools.partial`.

        Returns:
            (B, T, V) logits in at least fp32 without targets, else `LossSums` over all counted targets.

        Raises:
            UserError: the module returns something else than such logits.
        """
        z = self.network(input_ids)
        wanted = (*input_ids.shape, self.vocab_size)
        if not isinstance(z, Tensor) or z.shape != wanted or not z.is_floating_point():
            seen = f"{z.dtype} of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise UserError(
                f"{self.architecture.class_path} returns {seen} for input_ids of shape {tuple(input_ids.shape)}; it must "
                f"return logits of shape {wanted}, batch, positions and vocabulary (--architecture)"
            )
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z if targets is None else loss(z, targets)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give parameters and buffers the values that a new module has."""
        fresh = self.architecture.build(self.vocab_size)
        for own, new in (
            (self.network.named_parameters(), fresh.named_parameters()),
            (self.network.named_buffers(), fresh.named_buffers()),
        ):
            values = dict(new)
            for name, tensor in own:
                fill_(tensor, values[name])

    def num_parameters(self) -> int:
        """Parameters, a shared one once."""
        return sum(p.numel() for p in self.parameters())
