"""The optimizer Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_llm.core._torch import foreach_add_, foreach_lerp, foreach_mul_, foreach_sign_, lerp_
from lit_llm.core.dtensor import local_gradients, local_part
from lit_llm.core.memory import MUON_BATCH_NUMEL
from lit_llm.core.number_domain import at_least, below, check_ranges
from lit_llm.optim.group_optimizer import GroupOptimizer, undone_if
from lit_llm.optim.owners import turns


class Lion(GroupOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2). The update is the sign of an interpolated momentum.

        u = sign(β1 m + (1 − β1) g);   θ ← (1 − η λ) θ − η u;   m ← β2 m + (1 − β2) g

    Every weight moves by η (`lr`), so η should be AdamW's divided by 3 to 10, and λ (`weight_decay`) AdamW's times 3 to 10.

    Raises:
        UserError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Annotated[float, at_least(0, 10_000)] = 1e-4,
        betas: Annotated[tuple[float, float], below(0, 1)] = (0.9, 0.99),
        weight_decay: Annotated[float, at_least(0, 10_000)] = 0.0,
    ) -> None:
        check_ranges(Lion, locals())
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
        # A step copies bf16 and fp16 parameters, and all tensors if it may be undone. Parts are updated: copies stay small.
        copies = self.found_inf is not None or any(p.dtype.itemsize < 4 for p in params)
        if not copies:
            self._update(group, params)
            return
        # On a CPU, one parameter at a time is updated, so that its copies fit the cache.
        most = 0 if params[0].device.type == "cpu" else MUON_BATCH_NUMEL
        for numbers in turns([p.numel() for p in params], [0] * len(params), most):
            self._update(group, [params[i] for i in numbers])

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Make Lion's step for `params` and their momenta. bf16 and fp16 parameters are updated in fp32, and rounded once.

        On CPUs `_foreach_mul_` would round its factor to the tensors' dtype: in bf16, 0.998 becomes 0.996.
        """
        local, grads = [local_part(p) for p in params], local_gradients(params)
        averages = [local_part(self.state[p]["exp_avg"]) for p in params]
        beta1, beta2 = group["betas"]
        with undone_if(self.found_inf, local, averages):
            updates = foreach_lerp(averages, grads, 1 - beta1)
            foreach_sign_(updates)
            wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in local]  # the same tensor if it is wide
            foreach_mul_(wide, 1 - group["lr"] * group["weight_decay"])
            foreach_add_(wide, [update.to(w) for update, w in zip(updates, wide, strict=True)], alpha=-group["lr"])
            for part, w in zip(local, wide, strict=True):
                if w is not part:
                    part.copy_(w)
            lerp_(averages, grads, 1 - beta2)
