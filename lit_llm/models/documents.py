"""Documents within a sequence: their numbers, and positions that restart in each.

Shape letters: B sequences, S positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where each position is in its document."""

    positions: Tensor
    """(B, S) int64, from 0."""
    lengths: Tensor
    """(B, S) int64: positions of the document, as far as it is in the sequence."""


def document_numbers(ids: Tensor, eos_id: int) -> Tensor:
    """Number the documents of each sequence: (B, S) ids → (B, S). An end-of-document id opens the document after it.

    So does the data's numbering if documents begin with no id of their own: the first token is predicted from that id.
    """
    return ids.eq(eos_id).cumsum(dim=1)


def places_in(documents: Tensor) -> Places:
    """The places of (B, S) document numbers, which never decrease along a sequence. Nothing waits for the device."""
    batch, size = documents.shape
    place = torch.arange(size, device=documents.device).expand(batch, size)  # (B, S)
    changes = documents[:, 1:] != documents[:, :-1]  # (B, S - 1)
    edge = changes.new_ones(batch, 1)
    first = torch.where(torch.cat((edge, changes), dim=1), place, 0).cummax(dim=1).values
    last = torch.where(torch.cat((changes, edge), dim=1), place, size).flip(1).cummin(dim=1).values.flip(1)
    return Places(place - first, last - first + 1)
