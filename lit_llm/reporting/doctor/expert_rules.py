"""Rules about the experts of a mixture, from what `ExpertBalance` logs."""

from __future__ import annotations

from lit_llm.reporting.doctor.finding import error, warning
from lit_llm.reporting.doctor.observed import Observed

FEWEST_TOKENS = 100
"""Of each expert, a step, if all have equally many. Below, an expert may have none by chance."""
LOAD_HIGH = 0.8
"""Where the load of the busiest expert lies between 1, of balanced ones, and the largest that there can be."""


@error(
    "expert-bias-too-large",
    "the biases of the experts outweigh the scores of the router, which are at most 1",
    "--expert_balance.rate 0.001",
    "experts/bias, experts/load",
    "likely",
    explains=("experts-unbalanced", "loss-spikes", "loss-stuck"),
)
def bias_too_large(run: Observed) -> str | None:
    bias, moves = run.last("experts/bias"), run.setting("expert_balance.init_args.rate", 0 if run.config else 1)
    if bias is None or bias <= 1 or not moves:
        return None
    return f"a bias is {bias:.3g} away from the mean of its layer, so that it alone decides who gets a token"


@warning(
    "experts-unbalanced",
    "nothing balances the experts, or too weakly",
    "--model.moe.balance 0.01, or --expert_balance ExpertBalance with a rate of 0.001",
    "experts/load, experts/dead",
    "likely",
)
def unbalanced(run: Observed) -> str | None:
    experts, top_k, tokens = run.setting("model.moe.experts"), run.setting("model.moe.top_k"), run.finite("progress/tokens")
    if not isinstance(experts, int) or not isinstance(top_k, int) or not tokens or experts < 2 * top_k:
        return None
    if run.setting("lora") is not None:  # which freezes the routers
        return None
    if tokens[-1][1] / tokens[-1][0] * top_k / experts < FEWEST_TOKENS:
        return None
    since = run.step - run.step // 4
    dead, loads = run.values("experts/dead", since), run.values("experts/load", since)
    if len(loads) < 4:
        return None
    # What balances may take long to wake a last expert.
    balances = ("model.moe.balance", "model.moe.sequence_balance", "expert_balance.init_args.rate")
    if dead and min(dead) >= 1 and not any(run.setting(key) for key in balances):
        return f"in every logged step since {since:,} some experts ({min(dead):.0f} or more) had no token at all"
    if min(loads) - 1 < LOAD_HIGH * (experts / top_k - 1):
        return None
    return f"in every logged step since {since:,} one expert had at least {min(loads):.1f} times its share of the tokens"


EXPERT_RULES = (bias_too_large, unbalanced)
