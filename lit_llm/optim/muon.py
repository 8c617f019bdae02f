"""The optimizer MuonAdamW."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lit_llm._torch import foreach_lerp, foreach_lerp_, foreach_mul_
from lit_llm.buffer_sizes import MUON_BATCH_NUMEL
from lit_llm.dtensor import gather_like, local_gradients, local_part, local_slice
from lit_llm.errors import UserError
from lit_llm.optim.found_inf import to_device, undone_if
from lit_llm.optim.option_checks import check_below_one, check_not_negative


class MuonAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for all other parameters, in one Optimizer, as automatic optimization needs.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; ``torch.optim.Muon`` computes the same). For a matrix of
    r rows and c columns, with O = `newton_schulz`:

        m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g  (Nesterov; otherwise u = m)
        θ ← (1 − η λ) θ − η s(r, c) O(u)

    s = √max(1, r/c) for ``adjust_lr="original"``; 0.2·√max(r, c) for ``"match_rms_adamw"``, which gives updates the
    usual RMS of AdamW, so that AdamW's learning rates apply (Liu et al. 2025, arXiv 2502.16982). AdamW is torch's fused kernel.

    Muon updates a parameter if it has 2 dimensions and its group is named ``matrix`` (as in `parameter_groups`) or has no
    name. A group with both kinds is split in two.

    Args:
        lr: learning rate of Muon groups without their own.
        adamw_lr: learning rate of AdamW groups without their own.
        momentum, nesterov, ns_steps, adjust_lr: Muon's options.
        ns_dtype: dtype of the Newton–Schulz iteration. "auto" is bfloat16 on accelerators, as in `torch.optim.Muon`, and
            float32 on CPUs. It does not depend on processor features, so that a run gives the same numbers on any CPU.
            "bfloat16" on a CPU with AMX is 2.3 to 6 times faster (k, r, c = 16, 128, 128: 2.8 instead of 6.4 ms; 8, 256, 1024:
            13 instead of 77 ms). Other CPUs emulate bf16. It increases differences between layouts to about 2^-8.
        betas, eps: AdamW's options.
        weight_decay: decoupled weight decay of groups without their own, for both algorithms.

    Raises:
        UserError: if an option is out of range.
    """

    honours_found_inf = True
    found_inf: Tensor | None = None

    _MUON_ONLY = frozenset({"momentum", "nesterov", "ns_steps", "ns_dtype", "adjust_lr"})
    _ADAMW_ONLY = frozenset({"betas", "eps", "adamw_lr"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        adamw_lr: float = 0.01,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: Literal["original", "match_rms_adamw"] = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        check_not_negative(lr=lr, adamw_lr=adamw_lr, weight_decay=weight_decay, eps=eps)
        check_below_one(**{"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]})
        if ns_steps < 1:
            raise UserError(f"ns_steps is {ns_steps}, but must be at least 1 (--optimizer.ns_steps).")
        if adjust_lr not in _LR_SCALE:
            known = " or ".join(_LR_SCALE)
            raise UserError(f"adjust_lr is {adjust_lr!r}, but must be {known} (--optimizer.adjust_lr).")
        if ns_dtype not in _NS_DTYPES:
            raise UserError(f"ns_dtype is {ns_dtype!r}, but must be {' or '.join(_NS_DTYPES)} (--optimizer.ns_dtype).")
        defaults = {
            "lr": lr,
            "adamw_lr": adamw_lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr": adjust_lr,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split by algorithm. Each part keeps only the options that its algorithm reads."""
        params = param_group["params"]
        items = [params] if isinstance(params, Tensor) else list(params)  # tensors, or (name, tensor) as torch allows
        tensors = [item[1] if isinstance(item, tuple) else item for item in items]
        may_take_muon = param_group.get("name", "matrix") == "matrix"
        takes_muon = [may_take_muon and isinstance(t, Tensor) and t.ndim == 2 for t in tensors]
        for muon in (True, False):
            chosen = [item for item, is_muon in zip(items, takes_muon, strict=True) if is_muon == muon]
            if not chosen:
                continue
            group = {**param_group, "params": chosen, "algorithm": "muon" if muon else "adamw"}
            if not muon:
                group.setdefault("lr", self.defaults["adamw_lr"])
                # Optimizer.load_state_dict reads this: a fused kernel needs its step counter on the parameter's device.
                group["fused"] = True
                if any(takes_muon) and "name" in group:
                    group["name"] = f"{group['name']}_adamw"
            super().add_param_group(group)
            for key in self._ADAMW_ONLY if muon else self._MUON_ONLY | {"adamw_lr"}:
                group.pop(key, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Checkpoints from before `ns_dtype` existed load with its default."""
        super().__setstate__(state)
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                group.setdefault("ns_dtype", "auto")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self._muon if group["algorithm"] == "muon" else self._adamw)(group, params)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # Small matrices of one shape, or of its transpose, are orthogonalised as one batch, because a single one underuses the
        # device. A batch of large matrices would only cost memory.
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for p in params:
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            batches[min(p.shape), max(p.shape), p.device, mesh].append(p)
        for same_shape in batches.values():
            at_once = max(1, MUON_BATCH_NUMEL // same_shape[0].numel())
            for start in range(0, len(same_shape), at_once):
                self._muon_batch(group, same_shape[start : start + at_once])

    def _muon_batch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        local = [local_part(p) for p in params]
        grads = local_gradients(params)
        buffers = [local_part(self.state[p]["momentum_buffer"]) for p in params]
        momentum, lr = group["momentum"], group["lr"]
        with undone_if(self.found_inf, local, buffers):
            foreach_lerp_(buffers, grads, 1 - momentum)
            updates = foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
            whole = [gather_like(u, p) for u, p in zip(updates, params, strict=True)]  # (r, c) or (c, r) each
            wide = torch.stack([u.mT if _is_tall(u) else u for u in whole])  # (k, r ≤ c, c)
            dtype = newton_schulz_dtype(group["ns_dtype"], wide.device.type)
            if isinstance(params[0], DTensor):
                wide = newton_schulz_on_mesh(wide, params[0].device_mesh, steps=group["ns_steps"], dtype=dtype)
            else:
                wide = newton_schulz(wide, steps=group["ns_steps"], dtype=dtype)
            foreach_mul_(local, 1 - lr * group["weight_decay"])
            for p, part, o in zip(params, local, wide.unbind(), strict=True):  # o: (r, c), r ≤ c
                o = o.mT if _is_tall(p) else o  # the parameter's shape
                o = o[local_slice(p)] if isinstance(p, DTensor) else o  # the local part's shape
                part.add_(o.to(part.device), alpha=-lr * _LR_SCALE[group["adjust_lr"]](*p.shape))

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        states = [self.state[p] for p in params]
        adamw(
            [local_part(p) for p in params],
            local_gradients(params),
            [local_part(s["exp_avg"]) for s in states],
            [local_part(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=None if self.found_inf is None else to_device(states[0]["step"].device, self.found_inf),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


_LR_SCALE: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _is_tall(p: Tensor) -> bool:
    return p.shape[0] > p.shape[1]


_NS_DTYPES = ("auto", "float32", "bfloat16")


def newton_schulz_dtype(ns_dtype: str, device_type: str) -> torch.dtype:
    """The dtype of the iteration for the option `ns_dtype` of `MuonAdamW`. bf16 is precise enough for a direction."""
    if ns_dtype == "auto":
        ns_dtype = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[ns_dtype]


def newton_schulz(x: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate U Vᵀ of each matrix U S Vᵀ. Singular values end in about [0.7, 1.2].

    Quintic iteration X ← a X + (b A + c A²) X, A = X Xᵀ, from X / ‖X‖_F. With the coefficients of Jordan et al. 2024,
    singular values do not converge to exactly 1, but small ones grow faster.

    Args:
        x: (k, r, c) with r ≤ c, so that A is the smaller Gram matrix. A zero matrix stays zero.
        dtype: of the iteration and of the result.

    Returns:
        (k, r, c) in `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (k, r, r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_on_mesh(x: Tensor, mesh: DeviceMesh, *, steps: int, dtype: torch.dtype) -> Tensor:
    """`newton_schulz` of k matrices that every rank of a mesh holds. Each rank computes k / ranks of them.

    Args:
        x: (k, r, c) with r ≤ c, equal on all ranks of `mesh`.
        mesh: of any number of dimensions. Ranks outside it do not call this.

    Returns:
        (k, r, c) in `dtype`, equal on all ranks of `mesh`.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only ranks of the mesh hold its parameters"
    index = 0  # of this rank in the mesh, row-major
    for position, size in zip(coordinate, mesh.shape, strict=True):
        index = index * size + position
    share = -(-x.size(0) // mesh.size())  # matrices of one rank, rounded up
    mine = x[index * share : (index + 1) * share]  # (≤ share, r, c)
    out = newton_schulz(mine, steps=steps, dtype=dtype) if mine.size(0) else mine.to(dtype)
    out = torch.cat((out, out.new_zeros(share - out.size(0), *x.shape[1:])))  # (share, r, c): the last ranks may have fewer
    for dim in reversed(range(mesh.ndim)):  # the last dimension first, so that shares are in row-major order
        gathered = [torch.empty_like(out) for _ in range(mesh.size(dim))]
        dist.all_gather(gathered, out, group=mesh.get_group(dim))
        out = torch.cat(gathered)
    return out[: x.size(0)]
