"""Parameter groups, and the optimizers `MuonAdamW` and `Lion`.

SGD, AdamW and Adafactor come from torch.optim; each optimizer takes the groups of `parameter_groups`. Each group has its own
``lr``, and a schedule scales all rates by one factor. A step never synchronises host and device.

With DTensor parameters (FSDP2, tensor parallelism) a step equals a step of whole parameters, up to rounding. Elementwise
updates run on each rank's shards. Muon needs whole matrices: each step gathers the momentum, and each rank orthogonalises
some of the matrices.

Both optimizers honour the attribute ``found_inf`` like torch's fused optimizers: None, or a float tensor of one element. If
``found_inf`` is 1, a step leaves parameters and state unchanged bit for bit, even with NaN or infinite gradients. If it is 0,
the step equals the ordinary step, bit for bit.
"""

from __future__ import annotations

from lit_llm.optim.lion import Lion
from lit_llm.optim.muon import MuonAdamW
from lit_llm.optim.newton_schulz import newton_schulz
from lit_llm.optim.parameter_groups import GROUPS, parameter_groups
from lit_llm.optim.torch_muon import TorchMuon
from lit_llm.optim.transfer import optimizer_of, scale_rates

__all__ = ["GROUPS", "Lion", "MuonAdamW", "TorchMuon", "newton_schulz", "optimizer_of", "parameter_groups", "scale_rates"]

# Checkpoints store the class path that recipes use, not the path of the defining file.
MuonAdamW.__module__ = Lion.__module__ = TorchMuon.__module__ = __name__
