"""The class of the ladder's techniques (`ladder.py`), the baseline, and the combination of several techniques."""

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
    """A change of the baseline. Fields that are not set leave the baseline unchanged.

    Steps are counted in tokens: the argument `t` of the functions is the number of tokens up to and including the current
    update, divided by the tokens of a baseline step. With the baseline's batch, t is the update's number, 1, 2, …, `total`.
    """

    name: str
    source: str
    """The technique's source: a paper, a repository or a description."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """{setting of `GPTConfig`: value, or function from the model's width to the value}."""
    model: Callable[[nn.Module], nn.Module] | None = None
    """Function that changes or wraps the initialised model. The result is called like `GPT`: model(ids, targets, loss=…)
    returns `LossSums`. `LossSums.loss` is trained, `LossSums.nll` is evaluated. The function should leave the model's outputs
    unchanged, or draw new weights from torch's generator."""
    groups: Callable[[nn.Module, list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    """Function (model, groups of `parameter_groups`) -> changed groups."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """{argument of `MuonAdamW`: value}."""
    loss: Callable[..., LossSums] | None = None
    """The loss function of training; None: `cross_entropy`."""
    rate: Callable[[float, int], float] | None = None
    """Function (t, total) -> factor of the learning rates."""
    before_step: Callable[[Optimizer, float, int], None] | None = None
    """Function (optimizer, t, total) that sets options of the groups, such as momentum, after the learning rates are set."""
    rows: Callable[[float, int], float] | None = None
    """Function (t, total) -> sequences of this update, as a fraction of the baseline's batch."""
    length: Callable[[float, int], int] | None = None
    """Function (t, total) -> number of equal pieces into which each sequence is cut, a divisor of the block size."""

    def settings(self, width: int) -> dict[str, Any]:
        """Return `config` with values for a model of width `width`."""
        return {key: value(width) if callable(value) else value for key, value in self.config.items()}


BASELINE = Technique("baseline", "GPTConfig(), MuonAdamW, cosine to a tenth after 20 steps of warmup, gradients clipped at 1")


def baseline_rate(t: float, total: int) -> float:
    return wsd(t, peak=1.0, final=FINAL_RATIO, warmup_steps=min(WARMUP_STEPS, total // 5), total_steps=total, shape="cosine")  # type: ignore[arg-type]


def stack(techniques: Sequence[Technique]) -> Technique:
    """Return all techniques combined. Their functions `model`, `groups` and `before_step` apply in the order of the techniques.

    Raises:
        UserError: two techniques set the same setting to different values.
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
