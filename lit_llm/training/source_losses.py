"""The loss of each source of a mixture: sums on the device, from the rows of many batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_llm.models.loss import LossSums


class SourceLosses:
    """Sums of NLL and counted targets by source since the last `take`.

    The sums are the same bits in every run: each is a masked sum over rows, without atomic additions. A source whose loss is
    NaN leaves the others as they are. Nothing is saved: checkpoints are made between optimizer steps, when all sums are 0.

    Args:
        names: of the sources, in the order of their numbers in a batch's `sources`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: Tensor | None = None  # (2, S): NLL in nats, counted targets

    def add(self, sources: Tensor, sums: LossSums) -> None:
        """Add a batch.

        Args:
            sources: (B,) int64, the number of each row's source.
            sums: with `row_nll` and `row_count`.
        """
        assert sums.row_nll is not None and sums.row_count is not None, "call the loss with by_row=True"
        # float32 is too coarse for a long validation. MPS has no other.
        dtype = torch.float32 if sources.device.type == "mps" else torch.float64
        rows = torch.stack((sums.row_nll.to(dtype), sums.row_count.to(dtype)))  # (2, B)
        numbers = torch.arange(len(self.names), device=sources.device)
        added = torch.where(sources == numbers[:, None], rows[:, None], 0).sum(dim=-1)  # (2, S)
        self._sums = added if self._sums is None else self._sums + added

    def take(self, device: torch.device) -> Tensor:
        """The sums, (2 S,): NLL of all sources, then their counts; zeros on `device` without a batch. Starts over.

        Sum it over ranks before `losses`.
        """
        sums, self._sums = self._sums, None
        return torch.zeros(2 * len(self.names), dtype=torch.float64, device=device) if sums is None else sums.flatten()

    def losses(self, prefix: str, sums: Sequence[float]) -> dict[str, float]:
        """Rows to log, such as "train/web/loss", from what `take` gave. A source without counted targets is left out."""
        nll, counts = sums[: len(self.names)], sums[len(self.names) :]
        return {f"{prefix}/{name}/loss": n / c for name, n, c in zip(self.names, nll, counts, strict=True) if c}
