"""Parameter groups, and the optimizers torch does not have: Muon with AdamW in one Optimizer, and Lion.

SGD, AdamW and Adafactor are torch.optim's own; any of them takes the groups of `parameter_groups`. Nothing here reads a
tensor on the host, and every group is driven by its own ``lr``, so a schedule scales all of them alike.

Distributed parameters (FSDP2, tensor parallelism) give the steps of whole ones, up to rounding: what works element by element
works on each rank's part. Muon needs whole matrices: each step gathers the momentum, and the ranks share out
the matrices among them, so that none is orthogonalised twice.

Both honour ``found_inf`` as torch's fused optimizers do: if the attribute is set, to a float tensor of one element, a
step where it is 1 leaves parameters and state bit for bit as they were, whatever the gradients (NaN, infinity), and one
where it is 0 is bit for bit the ordinary step. The device decides; the host never learns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lit_llm.buffer_sizes import MUON_BATCH_NUMEL
from lit_llm.dtensor import local_slice
from lit_llm.errors import UserError

GROUPS = ("matrix", "embedding", "vector")


def parameter_groups(model: nn.Module, **overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model by their role; each appears once, empty groups not at all.

    * ``embedding``: weights of ``nn.Embedding`` modules and of whatever is called ``head``, tied or not;
    * ``matrix``: every other tensor of at least 2 dimensions, i.e. the hidden weights;
    * ``vector``: the rest, biases and norm gains; ``weight_decay`` is 0 there and is the optimizer's own elsewhere.

    Args:
        overrides: options of one group by its name, e.g. ``embedding={"lr": 3e-4}``.

    Raises:
        UserError: an override for a group that does not exist.
    """
    if unknown := sorted(overrides.keys() - set(GROUPS)):
        raise UserError(f"parameter group {unknown[0]!r} does not exist: the groups are {', '.join(GROUPS)}.")
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    # named_parameters yields a shared tensor once, under its first name: look at all names to find a tied head.
    embeddings |= {p for name, p in model.named_parameters(remove_duplicate=False) if "head" in name.split(".")}
    for p in model.parameters():
        if p.requires_grad:
            groups["vector" if p.ndim < 2 else "embedding" if p in embeddings else "matrix"].append(p)
    options: dict[str, dict[str, Any]] = {"vector": {"weight_decay": 0.0}}
    return [
        {"name": name, "params": params} | options.get(name, {}) | overrides.get(name, {})
        for name, params in groups.items()
        if params
    ]


class MuonAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for everything else, as one Optimizer (automatic optimization keeps working).

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; what ``torch.optim.Muon`` does), for a matrix of r rows
    and c columns, O = `newton_schulz`:

        m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g  (Nesterov; otherwise u = m)
        θ ← (1 − η λ) θ − η s(r, c) O(u)

    s = √max(1, r/c) for ``adjust_lr="original"``; 0.2·√max(r, c) for ``"match_rms_adamw"``, which gives updates AdamW's
    usual RMS so that its learning rates carry over (Liu et al. 2025, arXiv 2502.16982). AdamW is torch's fused one.

    A parameter gets Muon if it has 2 dimensions and its group is named ``matrix``, as `parameter_groups` does, or has
    no name; a group that holds both kinds is split in two.

    Args:
        lr: learning rate of the Muon groups that bring none of their own.
        adamw_lr: the same for the AdamW groups.
        momentum, nesterov, ns_steps, adjust_lr: Muon's options.
        ns_dtype: dtype of the Newton–Schulz iteration. "auto" is bfloat16 on accelerators, as in `torch.optim.Muon`, and
            float32 on CPUs. It never depends on the features of a processor, so that a run gives the same numbers on any CPU.
            "bfloat16" on a CPU with AMX is 2.3 to 6 times faster (k, r, c = 16, 128, 128: 2.8 against 6.4 ms; 8, 256, 1024:
            13 against 77 ms); elsewhere bf16 is emulated. It turns rounding differences between layouts into about 2^-8.
        betas, eps: AdamW's options.
        weight_decay: decoupled, of both, for groups that do not bring their own.

    Raises:
        UserError: an option outside its range.
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
        _check_not_negative(lr=lr, adamw_lr=adamw_lr, weight_decay=weight_decay, eps=eps)
        _check_below_one(**{"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]})
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
        """Add a group, split by algorithm, each part with its algorithm's options only: what it shows drives it."""
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
                # Read by Optimizer.load_state_dict: a fused kernel wants its step counter on the parameter's device.
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
        loss = _evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self._muon if group["algorithm"] == "muon" else self._adamw)(group, params)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # Small matrices of one shape, or of its transpose, are orthogonalised as one batch: one by one they leave the
        # machine idle. Large ones fill it alone, and a batch of them would only cost memory.
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for p in params:
            batches[min(p.shape), max(p.shape), p.device, isinstance(p, DTensor)].append(p)
        for same_shape in batches.values():
            at_once = max(1, MUON_BATCH_NUMEL // same_shape[0].numel())
            for start in range(0, len(same_shape), at_once):
                self._muon_batch(group, same_shape[start : start + at_once])

    def _muon_batch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        local = [_local(p) for p in params]
        grads = _local_grads(params)
        buffers = [_local(self.state[p]["momentum_buffer"]) for p in params]
        momentum, lr = group["momentum"], group["lr"]
        with _undone_if(self.found_inf, local, buffers):
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
            whole = [_gathered(u, p) for u, p in zip(updates, params, strict=True)]  # (r, c) or (c, r) each
            wide = torch.stack([u.mT if _is_tall(u) else u for u in whole])  # (k, r ≤ c, c)
            orthogonalise = _newton_schulz_shared_out if isinstance(params[0], DTensor) else newton_schulz
            wide = orthogonalise(wide, steps=group["ns_steps"], dtype=newton_schulz_dtype(group["ns_dtype"], wide.device.type))
            torch._foreach_mul_(local, 1 - lr * group["weight_decay"])
            for p, part, o in zip(params, local, wide.unbind(), strict=True):
                o = o.mT if _is_tall(p) else o
                o = o[local_slice(p)] if isinstance(p, DTensor) else o
                part.add_(o.to(part.device), alpha=-lr * _LR_SCALE[group["adjust_lr"]](*p.shape))

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        states = [self.state[p] for p in params]
        adamw(
            [_local(p) for p in params],
            _local_grads(params),
            [_local(s["exp_avg"]) for s in states],
            [_local(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=None if self.found_inf is None else _on(states[0]["step"].device, self.found_inf),
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
    """The dtype that `MuonAdamW` iterates in, from its option `ns_dtype`. bf16 is precise enough for a direction."""
    if ns_dtype == "auto":
        ns_dtype = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[ns_dtype]


def newton_schulz(x: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Roughly U Vᵀ of each matrix U S Vᵀ: singular values end in about [0.7, 1.2], a steeper slope at 0 is worth more.

    Quintic iteration X ← a X + (b A + c A²) X, A = X Xᵀ, from X / ‖X‖_F; coefficients of Jordan et al. 2024.

    Args:
        x: (k, r, c) with r ≤ c (the cheap side for A). A zero matrix stays zero.
        dtype: what to iterate in, and of the result.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (k, r, r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _newton_schulz_shared_out(x: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """`newton_schulz` of (k, r, c) that every rank has, each of them computing its share of the k matrices."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = -(-x.size(0) // ranks)
    mine = x[rank * share : (rank + 1) * share]
    out = newton_schulz(mine, steps=steps, dtype=dtype) if mine.size(0) else mine.to(dtype)
    out = torch.cat((out, out.new_zeros(share - out.size(0), *x.shape[1:])))  # the last ranks may have less
    gathered = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(gathered, out)
    return torch.cat(gathered)[: x.size(0)]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, sharing its memory; an ordinary tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_grads(params: list[Tensor]) -> list[Tensor]:
    """This rank's parts of the gradients, which are laid out as their parameters are (summed, where they still have to be)."""
    grads = []
    for p in params:
        assert p.grad is not None
        grad = p.grad
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        grads.append(_local(grad))
    return grads


def _gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole of what every rank has its part of, laid out as the parameter `like`."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()).full_tensor()


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum; one state.

        u = sign(β1 m + (1 − β1) g);   θ ← (1 − η λ) θ − η u;   m ← β2 m + (1 − β2) g

    Every coordinate moves by η, so η wants to be 3–10 times smaller than AdamW's, and λ larger by as much.

    Raises:
        UserError: an option outside its range.
    """

    honours_found_inf = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check_not_negative(lr=lr, weight_decay=weight_decay)
        _check_below_one(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            # A step that may be undone goes by parts: its copies stay small.
            for part in [params] if self.found_inf is None else _parts(params):
                self._update(group, part)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        local, grads = [_local(p) for p in params], _local_grads(params)
        averages = [_local(self.state[p]["exp_avg"]) for p in params]
        beta1, beta2 = group["betas"]
        with _undone_if(self.found_inf, local, averages):
            updates = torch._foreach_lerp(averages, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(local, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, grads, 1 - beta2)


@contextmanager
def _undone_if(found_inf: Tensor | None, *lists: list[Tensor]) -> Iterator[None]:
    """Give the tensors back their old values after the block, where ``found_inf`` is not 0; with None do nothing.

    Copies, because no arithmetic that cancels is exact: 0 · NaN is NaN, and -0.0 + 0.0 is 0.0.
    """
    if found_inf is None:
        yield
        return
    saved = [(t, t.clone()) for tensors in lists for t in tensors]
    yield
    undo = {device: _on(device, found_inf) != 0 for device in {t.device for t, _ in saved}}
    for t, old in saved:
        torch.where(undo[t.device], old, t, out=t)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device, without waiting for it unless that is the host, which would read it too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters one by one on a CPU, where the copies of one stay in the cache; else as many as fit in a batch."""
    part: list[Tensor] = []
    for p in params:
        if part and (p.device.type == "cpu" or sum(q.numel() for q in part) + p.numel() > MUON_BATCH_NUMEL):
            yield part
            part = []
        part.append(p)
    yield part


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not value >= 0:
            raise UserError(f"{name} is {value}, but must not be negative (--optimizer.{name}).")


def _check_below_one(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value}, but must be in [0, 1) (--optimizer.{name.split('[')[0]}).")
