"""The length of a run in the words of its first lines."""

from __future__ import annotations

from lit_llm.data import Mixture, TokenDataModule


def run_length(data: TokenDataModule, max_steps: int) -> str:
    """Such as "60 steps = 9,600 tokens = 1.20 epochs". The data must be open."""
    assert data.block_size is not None
    tokens = data.samples_before(max_steps) * data.block_size
    if isinstance(data, Mixture):
        drawn = data.draws()[-1].sources.items()
        epochs = ", ".join(f"{_epochs(draws.epochs)} epochs of {name}" for name, draws in drawn if draws.epochs)
    else:
        epochs = f"{_epochs(tokens / data.train_tokens)} epochs"
    return f"{max_steps:,} steps = {tokens:,} tokens = {epochs}"


def phases(data: TokenDataModule) -> list[str]:
    """A line about the phases of a mixture that are to come; none for other data, or at the end of a run."""
    described = data.describe_phases() if isinstance(data, Mixture) else ""
    return [f"phases: {described}"] if described else []


def _epochs(number: float) -> str:
    """12.345 -> "12.35", 0.00123 -> "0.0012": two decimals, or two significant digits if that shows more."""
    return f"{number:.2f}" if number >= 0.1 or number == 0 else f"{number:.2g}"
