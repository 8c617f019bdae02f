"""Rules of `doctor` about mixture-of-experts layers, from the curves that the callback `ExpertBalance` logs."""

from __future__ import annotations

from lit_llm.reporting.doctor.finding import SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed

FEWEST_TOKENS = 100
"""Loads are judged only if an expert's equal share of a step is at least FEWEST_TOKENS: below, it may get none by chance."""
LOAD_HIGH = 0.8
"""Limit of the busiest expert's load, on a scale from 0 (all experts get equally many tokens) to 1 (every token)."""
TWICE = 2.0
"""Limit of the busiest expert's load, in multiples of an equal share, for new models in which nothing balances the experts."""


@error.likely(  # the scores are probabilities, at most 1
    "the biases of the experts outweigh the scores of the router: their rate is too high",
    "--expert_balance.rate 0.001",
    "experts/bias, experts/load",
    explains=(*SLOW, "experts-unbalanced", "loss-spikes"),
)
def expert_bias_too_large(run: Observed) -> str | None:
    if (run.config and not run.number("expert_balance.init_args.rate")) or not run.points("experts/bias"):
        return None  # nothing moves the biases, for example of imported weights
    if (bias := run.last("experts/bias")) <= 1:
        return None
    return f"a bias is {bias:.3g} away from the mean of its layer, so that it alone decides who gets a token"


@warning.likely(
    "nothing balances the experts, or too weakly",
    "--model.moe.balance 0.01, or --expert_balance ExpertBalance with a rate of 0.001",
    "experts/load, experts/dead",
)
def experts_unbalanced(run: Observed) -> str | None:
    experts, top_k, tokens = run.number("model.moe.experts"), run.number("model.moe.top_k"), run.tokens_per_step
    if not experts or not top_k or not tokens or tokens * top_k / experts < FEWEST_TOKENS or experts < 2 * top_k:
        return None
    if run.setting("lora") is not None:  # LoRA freezes the routers
        return None
    since = run.step - run.step // 4
    dead, loads = run.values("experts/dead", since), run.values("experts/load", since)
    if len(loads) < 4:
        return None
    # Balancing may take long to wake a last expert, or to unload a busy one.
    balances = ("model.moe.balance", "model.moe.sequence_balance", "expert_balance.init_args.rate")
    nothing_balances = not any(run.setting(key) for key in balances)
    if dead and min(dead) >= 1 and nothing_balances:
        return f"in every logged step since {since:,} some experts ({min(dead):.0f} or more) had no token at all"
    high = 1 + LOAD_HIGH * (experts / top_k - 1)
    if nothing_balances and run.from_scratch:  # trained weights may have been balanced on other text
        high = min(high, TWICE)
    if min(loads) < high:
        return None
    return f"in every logged step since {since:,} one expert had at least {min(loads):.1f} times its share of the tokens"
