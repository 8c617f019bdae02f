"""Rules about the experts of a mixture, from what `ExpertBalance` logs."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed

FEWEST_TOKENS = 100
"""Of each expert, a step, if all have equally many. Below, an expert may have none by chance."""
LOAD_HIGH = 0.8
"""Where the load of the busiest expert lies between 1, of balanced ones, and the largest that there can be."""
TWICE = 2.0
"""Load of an expert that computes twice its share."""
MOVES = 4
"""Of a bias. If no score is R < 2 rate above another, an expert whose bias is R above another's gets all tokens of both, and
comes down. So no two biases are further apart than R + 2 rate < 4 rate. Biases that still approach what balances are as many
moves away as there were steps; those that follow the chance of each batch, about the root of it."""
LEAST_STEPS = (2 * MOVES) ** 2
"""Their root is twice `MOVES`."""


@error.likely(
    "the biases of the experts outweigh the scores of the router, at most 1: their rate is too high, or their sign wrong",
    "--expert_balance.rate 0.001",
    "experts/bias, experts/load",
    explains=(*SLOW, "experts-unbalanced", "loss-spikes"),
)
def expert_bias_too_large(run: Observed) -> str | None:
    """A bias outweighs every score; or moves do, so that biases go back and forth and balance nothing.

    Not: biases that nothing moves (of imported weights), that still grow, that balance, or of few tokens.
    """
    rate = run.number("expert_balance.init_args.rate") or 0
    if (run.config and not rate) or not run.points("experts/bias"):
        return None
    bias = run.last("experts/bias")
    if bias > 1:
        return f"a bias is {bias:.3g} away from the mean of its layer, so that it alone decides who gets a token"
    steps = run.step - run.start_of_launch(run.step)  # at this rate
    since = run.step - steps // 4
    biases, loads = run.values("experts/bias", since), run.values("experts/load", since)
    if not rate or steps < LEAST_STEPS or len(loads) < 4 or not _enough_tokens(run):
        return None
    load, moves = statistics.median(loads), max(biases) / rate
    if load < TWICE or moves > MOVES:
        return None
    return (
        f"since step {since:,} no bias was more than {moves:.1f} moves of {rate:g} away from the mean of its layer, yet one "
        f"expert had {load:.1f} times its share: a move undoes the one before"
    )


@warning.likely(
    "nothing balances the experts, or too weakly",
    "--model.moe.balance 0.01, or --expert_balance ExpertBalance with a rate of 0.001",
    "experts/load, experts/dead",
)
def experts_unbalanced(run: Observed) -> str | None:
    experts, top_k = run.setting("model.moe.experts"), run.setting("model.moe.top_k")
    if not _enough_tokens(run) or experts < 2 * top_k:
        return None
    if run.setting("lora") is not None:  # which freezes the routers
        return None
    since = run.step - run.step // 4
    dead, loads = run.values("experts/dead", since), run.values("experts/load", since)
    if len(loads) < 4:
        return None
    # What balances may take long to wake a last expert, or to unload a busy one.
    balances = ("model.moe.balance", "model.moe.sequence_balance", "expert_balance.init_args.rate")
    nothing_balances = not any(run.setting(key) for key in balances)
    if dead and min(dead) >= 1 and nothing_balances:
        return f"in every logged step since {since:,} some experts ({min(dead):.0f} or more) had no token at all"
    high = 1 + LOAD_HIGH * (experts / top_k - 1)
    if nothing_balances and run.from_scratch:  # others may have been balanced on a text of all kinds
        high = min(high, TWICE)
    if min(loads) < high:
        return None
    return f"in every logged step since {since:,} one expert had at least {min(loads):.1f} times its share of the tokens"


def _enough_tokens(run: Observed) -> bool:
    """Whether equally loaded experts would have `FEWEST_TOKENS` each. Without settings it is not known, and false."""
    experts, top_k, tokens = run.setting("model.moe.experts"), run.setting("model.moe.top_k"), run.tokens_per_step
    if not isinstance(experts, int) or not isinstance(top_k, int) or tokens is None:
        return False
    return tokens * top_k / experts >= FEWEST_TOKENS
