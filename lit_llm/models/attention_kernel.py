"""Names of the kernels of attention. This module imports no torch, because arguments are read without it."""

from typing import Literal

AttentionKernel = Literal["auto", "sdpa", "flash3", "flash4", "flex", "blocks"]
