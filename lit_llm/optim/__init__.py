"""Parameter groups, and the optimizers `MuonAdamW` and `Lion`.

SGD, AdamW and Adafactor come from torch.optim; each takes the groups of `parameter_groups`. Each group has its own ``lr``, and
a schedule scales all rates alike. A step never synchronises host and device.

With distributed parameters (FSDP2, tensor parallelism) a step equals a step of whole parameters, up to rounding. Elementwise
updates run on each rank's part. Muon needs whole matrices: each step gathers the momentum, and each rank orthogonalises a
different part of the matrices.

Both optimizers honour ``found_inf`` like torch's fused ones. The attribute is None or a float tensor of one element. If it is
1, a step leaves parameters and state unchanged bit for bit, even with NaN or infinite gradients. If it is 0, the step equals
the ordinary step, bit for bit.
"""

from __future__ import annotations

from lit_llm.optim.lion import Lion
from lit_llm.optim.muon import MuonAdamW
from lit_llm.optim.newton_schulz import newton_schulz
from lit_llm.optim.parameter_groups import GROUPS, parameter_groups
from lit_llm.optim.torch_muon import TorchMuon
from lit_llm.optim.transfer import optimizer_of, scale_rates

__all__ = ["GROUPS", "Lion", "MuonAdamW", "TorchMuon", "newton_schulz", "optimizer_of", "parameter_groups", "scale_rates"]

# Checkpoints store the class path that recipes use, not that of the defining file.
MuonAdamW.__module__ = Lion.__module__ = TorchMuon.__module__ = __name__
