"""What a technique of the ladder may change, and how techniques are stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_llm.callbacks.learning_rate_schedules import wsd
from lit_llm.core.errors import UserError
from lit_llm.models.loss import LossSums

WARMUP_STEPS, FINAL_RATIO = 20, 0.1


@dataclass(frozen=True)
class Technique:
    """One change of the baseline. What is not set is the baseline's.

    Steps are counted in tokens: `t` is the tokens of all updates up to this one, divided by the tokens of a step of the
    baseline. With the baseline's batch that is the number of the update, 1, 2, …, `total`.
    """

    name: str
    source: str
    """Where it comes from: a paper or an address."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `GPTConfig`, or functions of the width that give them."""
    model: Callable[[nn.Module], nn.Module] | None = None
    """Changes the initialised model, or wraps it. The result is called as `GPT` is: model(ids, targets, loss=…) gives
    `LossSums`. In training `loss` may hold more than `nll`; in evaluation only `nll` counts. It should change nothing at
    the start of training, or draw its weights from torch's generator."""
    groups: Callable[[nn.Module, list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    """Changes the groups of `parameter_groups`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `MuonAdamW`."""
    loss: Callable[..., LossSums] | None = None
    """The loss function of training; None: `cross_entropy`."""
    rate: Callable[[float, int], float] | None = None
    """(t, total) → factor of the learning rates."""
    before_step: Callable[[Optimizer, float, int], None] | None = None
    """(optimizer, t, total): sets options of the groups, such as weight decay or momentum. The rates are already set."""
    rows: Callable[[float, int], float] | None = None
    """(t, total) → fraction of the batch's sequences in this update."""
    length: Callable[[float, int], int] | None = None
    """(t, total) → the number of equal pieces that each sequence is cut into, a divisor of the block size."""

    def settings(self, width: int) -> dict[str, Any]:
        """`config` of a model of this width."""
        return {key: value(width) if callable(value) else value for key, value in self.config.items()}


BASELINE = Technique("baseline", "GPTConfig(), MuonAdamW, cosine to a tenth after 20 steps of warmup, gradients clipped at 1")


def baseline_rate(t: float, total: int) -> float:
    return wsd(t, peak=1.0, final=FINAL_RATIO, warmup_steps=min(WARMUP_STEPS, total // 5), total_steps=total, shape="cosine")  # type: ignore[arg-type]


def stack(techniques: Sequence[Technique]) -> Technique:
    """All of them at once. Models, groups and what runs before a step apply in their order.

    Raises:
        UserError: two of them set the same thing, and only one can have it.
    """
    return reduce(_both, techniques)


def _both(a: Technique, b: Technique) -> Technique:
    def one(what: str) -> Any:
        mine, other = getattr(a, what), getattr(b, what)
        if mine is not None and other is not None and mine is not other:
            raise UserError(f"{a.name} and {b.name} both set the {what}: they cannot be stacked (--techniques).")
        return other if mine is None else mine

    def settings(what: str) -> dict[str, Any]:
        mine, other = getattr(a, what), getattr(b, what)
        if shared := sorted(key for key in mine.keys() & other.keys() if mine[key] != other[key]):
            raise UserError(f"{a.name} and {b.name} both set {what}.{shared[0]}: they cannot be stacked (--techniques).")
        return {**mine, **other}

    return Technique(
        name=f"{a.name}+{b.name}",
        source=f"{a.source}; {b.source}",
        config=settings("config"),
        model=_chain(a.model, b.model),
        groups=_chain_groups(a.groups, b.groups),
        options=settings("options"),
        loss=one("loss"),
        rate=one("rate"),
        before_step=_in_turn(a.before_step, b.before_step),
        rows=one("rows"),
        length=one("length"),
    )


def _chain(a: Callable[[Any], Any] | None, b: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if a is None or b is None:
        return b if a is None else a
    return lambda model: b(a(model))


def _chain_groups(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return lambda model, groups: b(model, a(model, groups))


def _in_turn(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a

    def both(*arguments: Any) -> None:
        a(*arguments)
        b(*arguments)

    return both
