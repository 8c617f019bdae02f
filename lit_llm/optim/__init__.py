"""Parameter groups, and the optimizers that torch does not have: `MuonAdamW` and `Lion`.

SGD, AdamW and Adafactor come from torch.optim; any of them takes the groups of `parameter_groups`. Each group has its own
``lr``, so a schedule scales all of them alike. A step never synchronises host and device.

With distributed parameters (FSDP2, tensor parallelism) a step equals that of whole parameters, up to rounding. Elementwise
updates run on each rank's part. Muon needs whole matrices: each step gathers the momentum, and the ranks share the matrices
out among them, so that each is orthogonalised once.

Both optimizers honour ``found_inf`` as torch's fused ones do. If the attribute holds a float tensor of one element, a step
where it is 1 leaves parameters and state unchanged bit for bit, whatever the gradients (NaN, infinity). A step where it is 0
is the ordinary step, bit for bit.
"""

from __future__ import annotations

from lit_llm.optim.lion import Lion
from lit_llm.optim.muon import MuonAdamW, newton_schulz
from lit_llm.optim.parameter_groups import GROUPS, parameter_groups

__all__ = ["GROUPS", "Lion", "MuonAdamW", "newton_schulz", "parameter_groups"]

# Checkpoints record where a class is found: by the path that a recipe names, not by the file that defines it.
MuonAdamW.__module__ = Lion.__module__ = __name__
