"""What the faults of the blind exam are made of: their record, and the places of lit_llm at which they are injected.

A fault patches lit_llm in the process of its run, before `fit` starts. So settings and logs show no more than those of a user
whose code has the fault. Each patch says once on stderr that it took effect; a run whose injection did not is no run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils.data import Dataset

from lit_llm.data.batches import GlobalOrder
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.training.language_model import LanguageModel

FIRED: list[str] = []
"""Names of the patches that took effect in this process."""


@dataclass
class Fault:
    """A fault, and what a competent colleague would say about its run."""

    name: str
    kind: str
    """a: short convolutions and Muon; b: grouped queries, SwiGLU, RMSNorm and AdamW; c: like GPT-2."""
    area: str
    cause: str
    accept: tuple[str, ...]
    """Other wordings that count as right."""
    wrong: str
    """A diagnosis that would mislead."""
    setup: str = ""
    """Flags that the healthy twin has, too. @ is the folder of the exam's data, KIND the kind, and CHAT, PAIRS and MOE are
    flags that `blind_faults.MACROS` has."""
    flags: str = ""
    """Flags of the fault."""
    ranks: int = 1
    resumed: bool = False
    """The run is stopped at its half and resumed; the injection is in the second part only."""
    place: Callable[[Any], None] | None = None
    """Of the decorated function, such as `batches("train")`. None: it injects by itself."""
    inject: Callable[[], None] | None = None


FAULTS: dict[str, Fault] = {}


def fault(name: str, kind: str, area: str, cause: str, *accept: str, **more: Any) -> Callable[[Callable[..., Any]], Fault]:
    """Enter a fault. As a decorator of a function, that injects it; a fault of flags alone has none."""
    assert name not in FAULTS, f"two faults are named {name}"
    entry = FAULTS[name] = Fault(name, kind, area, cause, accept, **more)

    def of_code(function: Callable[..., Any]) -> Fault:
        place = entry.place
        entry.inject = function if place is None else functools.partial(place, function)
        return entry

    return of_code


def fire(what: str) -> None:
    if what not in FIRED:
        FIRED.append(what)


# -- places ----------------------------------------------------------------------------------------------------------------


def replace(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorator: `owner.name(…)` becomes `f(original, …)`."""

    def of(f: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            fire(f"{getattr(owner, '__name__', owner)}.{name}")
            return f(original, *args, **kwargs)

        setattr(owner, name, changed)

    return of


def progress(trainer: Any) -> float:
    """The part of the run's steps that has been made, in [0, 1]."""
    return trainer.global_step / max(1, trainer.max_steps)


class _Changed(Dataset):
    def __init__(self, blocks: Any, change: Callable[..., None], data: Any) -> None:
        self.blocks, self.change, self.data = blocks, change, data

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, numbers: Any) -> Any:
        batch = self.blocks[numbers]
        before = {name: tensor.clone() for name, tensor in batch.items()}
        trainer = self.data.trainer
        self.change(batch, at=progress(trainer), rank=trainer.global_rank)
        if any(before[name].shape != tensor.shape or not torch.equal(before[name], tensor) for name, tensor in batch.items()):
            fire("batch")
        return batch


def batches(*splits: str) -> Callable[[Callable[..., None]], None]:
    """Decorator: `change(batch, at=progress, rank=rank)` alters the batches of "train", "val" or both in place."""

    def of(change: Callable[..., None]) -> None:
        original = TokenDataModule._loader

        def _loader(self: Any, blocks: Any, order: Any) -> Any:
            is_chosen = ("train" if isinstance(order, GlobalOrder) else "val") in splits
            return original(self, _Changed(blocks, change, self) if is_chosen else blocks, order)

        TokenDataModule._loader = _loader  # type: ignore[method-assign]

    return of


def model_built(change: Callable[[Any], None]) -> None:
    """Decorator: `change(gpt)` once, when the model has its initial weights and no optimizer yet."""

    @replace(LanguageModel, "configure_model")
    def configure_model(original: Any, self: Any) -> None:
        is_new = self.model is None
        original(self)
        if is_new:
            with torch.no_grad():
                change(self.model)


def gradients(change: Callable[[Any, float], None]) -> None:
    """Decorator: `change(module, at)` has the gradients of a step, before callbacks read and clip them."""

    @replace(Precision, "_after_closure")
    def _after_closure(original: Any, self: Any, module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            change(module, progress(module.trainer))
        original(self, module, optimizer)


def after_step(change: Callable[[Any, Any], None]) -> None:
    """Decorator: `change(module, optimizer)` after each optimizer step."""

    @replace(LanguageModel, "optimizer_step")
    def optimizer_step(original: Any, self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        original(self, epoch, batch_idx, optimizer, closure)
        with torch.no_grad():
            change(self, optimizer)


def in_order(number: Callable[[Any, int, float], Any]) -> None:
    """Decorator: `number(g, samples, at)` is the block that each global sample g (n,) reads, as `order.sample_index` says else.

    `at` is the progress of the run at that sample.
    """

    @replace(TokenDataModule, "locate")
    def locate(original: Any, self: Any, g: Any) -> Any:
        total = self.max_steps * self.global_batch_size
        return number(g, len(self.train_blocks()), g / total)


def parameters(module: Any) -> list[Tensor]:
    """The parameters with a gradient."""
    return [p for p in module.parameters() if p.grad is not None]


def random_ids(like: Tensor, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(0, vocab_size, like.shape, generator=torch.Generator().manual_seed(seed))


def share(like: Tensor, part: float, seed: int) -> Tensor:
    """A mask of the shape that is true for a random part."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)) < part


def seed_of(batch: dict[str, Tensor]) -> int:
    """A number that follows from the ids of a batch."""
    return int(batch["input_ids"].sum()) % (1 << 30)


def cosine(x: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * x))
