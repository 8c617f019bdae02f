"""The optimizer MuonAdamW: Muon for hidden matrices, AdamW for other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from lit_llm.core._torch import foreach_lerp, lerp_
from lit_llm.core.dtensor import local_box, local_gradients, local_part, whole_experts, zeros_by_row
from lit_llm.core.memory import MUON_BATCH_NUMEL
from lit_llm.core.number_domain import above, at_least, below, check_ranges, whole
from lit_llm.optim.exchange import Matrix, MatrixExchange, exchanges_of
from lit_llm.optim.group_optimizer import GroupOptimizer, to_device, undone_if
from lit_llm.optim.newton_schulz import newton_schulz, newton_schulz_dtype
from lit_llm.optim.owners import turns


class MuonAdamW(GroupOptimizer):
    """Muon for hidden matrices and AdamW for all other parameters, in one Optimizer, as automatic optimization needs.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; ``torch.optim.Muon`` computes the same). For a matrix θ of
    r rows and c columns, with gradient g, η = `lr`, λ = `weight_decay`, μ = `momentum` and O = `newton_schulz`:

        m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g  (Nesterov; otherwise u = m)
        θ ← (1 − η λ) θ − η s(r, c) O(u)

    s = √max(1, r/c) for ``adjust_lr="original"``; 0.2·√max(r, c) for ``"match_rms_adamw"``, which gives updates the
    usual RMS of AdamW, so that AdamW's learning rates apply (Liu et al. 2025, arXiv 2502.16982). AdamW is torch's fused kernel.

    With ``normuon_beta2`` (NorMuon: Li et al. 2025, arXiv 2510.05491) each row of O, which belongs to an output neuron, is
    divided by the root of a moving average of the row's mean square, and the matrix is scaled back to its former norm:

        v_i ← β2 v_i + (1 − β2) mean_j O_ij²;   N_ij = O_ij / (√v_i + 10⁻⁸);   O ← N ‖O‖ / ‖N‖

    Muon updates parameters with 2 dimensions in groups named ``matrix`` or ``projection`` (as in `parameter_groups`) or without
    a name, and each matrix of parameters with 3 dimensions in groups named ``experts``. AdamW updates all other parameters; a
    group with both kinds is split in two. If a parameter of experts is sharded, each rank orthogonalises every expert of which
    it holds a part.

    Args:
        lr: learning rate of Muon groups without their own ``lr``.
        adamw_lr: learning rate of AdamW groups without their own ``lr``.
        momentum, nesterov, ns_steps, adjust_lr: Muon's options.
        ns_dtype: dtype of the Newton–Schulz iteration. "auto" is bfloat16 on accelerators, as in `torch.optim.Muon`, and
            float32 on CPUs, whatever a CPU's features are, so that a run gives the same numbers on any CPU.
            On AMX CPUs, bfloat16 is 2.3 to 6 times as fast as float32 (16 matrices of 128 × 128: 2.8, not 6.4 ms; 8 of 256 ×
            1024: 13, not 77 ms). Other CPUs emulate bf16. With bf16, results on two layouts of ranks differ by about 2^-8.
        ns_method: coefficients of the iteration. "jordan": Jordan et al. 2024. "polar_express" (Amsel et al. 2025, arXiv
            2505.16932) brings singular values nearer to 1 than "jordan" does in as many steps, and so in the same time.
        normuon_beta2: β2 of NorMuon, in [0, 1). None: no NorMuon. NorMuon's state is one number per row, equal on all ranks.
        betas, eps: AdamW's options.
        weight_decay: decoupled weight decay, of both algorithms, for groups without their own ``weight_decay``.

    Raises:
        UserError: an option is out of range.
    """

    _SHARED = frozenset({"lr", "weight_decay"})
    _MUON_ONLY = frozenset({"momentum", "nesterov", "ns_steps", "ns_dtype", "ns_method", "normuon_beta2", "adjust_lr"})
    _ADAMW_ONLY = frozenset({"betas", "eps", "adamw_lr"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: Annotated[float, at_least(0, 10_000)] = 0.01,
        adamw_lr: Annotated[float, at_least(0, 10_000)] = 0.01,
        weight_decay: Annotated[float, at_least(0, 10_000)] = 0.1,
        momentum: Annotated[float, below(0, 1)] = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[int, whole(1, 99)] = 5,
        adjust_lr: Literal["original", "match_rms_adamw"] = "original",
        betas: Annotated[tuple[float, float], below(0, 1)] = (0.9, 0.95),
        eps: Annotated[float, above(0, 1)] = 1e-8,
        ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        ns_method: Literal["jordan", "polar_express"] = "jordan",
        normuon_beta2: Annotated[float | None, below(0, 1)] = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in self._SHARED | self._MUON_ONLY | self._ADAMW_ONLY}
        check_ranges(MuonAdamW, options)
        self._planned: dict[Any, list[MatrixExchange]] = {}  # by mesh and matrices
        super().__init__(params, options | {"betas": tuple(betas)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters as a Muon group, an AdamW group or, split, as both, each with its algorithm's options."""
        params = param_group["params"]
        items = [params] if isinstance(params, Tensor) else list(params)  # tensors, or (name, tensor) as torch allows
        tensors = [item[1] if isinstance(item, tuple) else item for item in items]
        dimensions = _MUON_DIMENSIONS.get(param_group.get("name", "matrix"))
        takes_muon = [isinstance(t, Tensor) and t.ndim == dimensions for t in tensors]
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
        super().__setstate__(state)
        self._planned = {}

    def _update_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        (self._muon if group["algorithm"] == "muon" else self._adamw)(group, params)

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group["normuon_beta2"] is not None and "row_square" not in self.state[p]:
                of_matrix = partial(torch.zeros, dtype=p.dtype, device=p.device)
                self.state[p]["row_square"] = of_matrix(p.size(0)) if p.ndim == 2 else zeros_by_row(p)
        alone = [p for p in params if not isinstance(p, DTensor) or p.ndim == 3]
        sizes = [local_part(p).numel() for p in alone]
        for numbers in turns(sizes, [0] * len(alone), MUON_BATCH_NUMEL):
            chosen = [alone[i] for i in numbers]
            updates = self._updates(group, chosen)
            squares: list[Tensor] = []
            rows: list[Any] = [slice(None)] * len(chosen)
            for i, p in enumerate(chosen):
                if p.ndim == 2:
                    updates[i] = self._orthogonal(group, updates[i])
                else:  # experts' matrices: gather every expert of which this rank holds a part
                    whole = updates[i]
                    if is_divided := isinstance(p, DTensor) and whole_experts(p) != list(p.placements):
                        parts = DTensor.from_local(whole, p.device_mesh, p.placements)
                        whole = parts.redistribute(placements=whole_experts(p)).to_local()
                    updates[i] = whole = self._orthogonal_experts(group, whole)
                    if is_divided:
                        own_rows, own_columns = local_box(p)[1:]  # type: ignore[arg-type]
                        rows[i], updates[i] = (slice(None), own_rows), whole[:, own_rows, own_columns].clone()  # frees the rest
                if group["normuon_beta2"] is not None:
                    squares.append(mean_squares(updates[i] if p.ndim == 2 else whole))
            self._apply(group, chosen, updates, squares or None, rows)
        meshes: dict[Any, list[DTensor]] = defaultdict(list)
        for p in params:
            if isinstance(p, DTensor) and p.ndim == 2:
                replicated = tuple(d for d, placement in enumerate(p.placements) if isinstance(placement, Replicate))
                meshes[p.device_mesh, replicated].append(p)
        for (mesh, _), distributed in meshes.items():
            for turn in self._turns(mesh, distributed):
                self._muon_on_mesh(group, turn, distributed)

    def _turns(self, mesh: DeviceMesh, params: list[DTensor]) -> list[MatrixExchange]:
        key = mesh, tuple(Matrix(tuple(p.shape), p.placements) for p in params)
        if key not in self._planned:
            self._planned[key] = exchanges_of(*key)
        return self._planned[key]

    def _muon_on_mesh(self, group: dict[str, Any], turn: MatrixExchange, params: Sequence[DTensor]) -> None:
        """Make Muon's step for the matrices of one exchange, whose owners orthogonalise them. Shards travel in `ns_dtype`.

        Args:
            turn: the exchange; its matrix numbers are indices in `params`.
            params: all of the group's matrices on the mesh with the same replicated dimensions.
        """
        device = torch.device(params[0].device_mesh.device_type)
        like = torch.empty(0, dtype=newton_schulz_dtype(group["ns_dtype"], device.type), device=device)
        parts: dict[int, Tensor] = {}
        for row, numbers in turn.rows.items():  # moves all momentum; keeps the directions of this row's matrices
            updates = self._updates(group, [params[i] for i in numbers])
            if row == turn.row:
                parts = {i: update.to(device, like.dtype).flatten() for i, update in zip(numbers, updates, strict=True)}
            del updates
        whole = turn.gather(parts, like)
        for i in whole:
            whole[i] = self._orthogonal(group, whole[i])
        squares = None
        if group["normuon_beta2"] is not None:
            squares = turn.to_all_ranks({i: mean_squares(update) for i, update in whole.items()}, device)
        parts = turn.scatter(whole, like)
        for row, numbers in turn.rows.items():
            of_row = None if squares is None else [squares[i] for i in numbers]
            boxes = [turn.local_rows(i) for i in numbers]
            self._apply(group, [params[i] for i in numbers], turn.share(row, parts, like), of_row, boxes)

    def _updates(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[Tensor]:
        """Update the momenta m of `params` on this rank. Return this rank's shards of the updates u (m, or Nesterov's)."""
        grads, momentum = local_gradients(params), group["momentum"]
        buffers = [local_part(self.state[p]["momentum_buffer"]) for p in params]
        with undone_if(self.found_inf, buffers):
            lerp_(buffers, grads, 1 - momentum)
            return list(foreach_lerp(grads, buffers, momentum)) if group["nesterov"] else [b.clone() for b in buffers]

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        dtype = newton_schulz_dtype(group["ns_dtype"], update.device.type)
        return newton_schulz(update, steps=group["ns_steps"], dtype=dtype, ns_method=group["ns_method"])

    def _orthogonal_experts(self, group: dict[str, Any], update: Tensor) -> Tensor:
        """Orthogonalise the matrices (E, r, c) of E experts, one by one. Returns (E, r, c)."""
        dtype = newton_schulz_dtype(group["ns_dtype"], update.device.type)
        matrices = update if dtype == update.dtype else torch.empty_like(update, dtype=dtype)
        for i, matrix in enumerate(update):
            matrices[i] = self._orthogonal(group, matrix)
        return matrices

    def _apply(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        updates: list[Tensor],
        squares: list[Tensor] | None,
        rows: Sequence[Any],
    ) -> None:
        """Decay this rank's shards of `params`, and add the scaled updates to the shards.

        bf16 and fp16 parameters are moved in fp32, because bf16 kernels round the ends of a tensor differently.

        Args:
            updates: this rank's shard of each orthogonal update, in the shape of the parameter's shard or flat.
            squares: `mean_squares` of each whole update. None: NorMuon is off.
            rows: for each parameter, the index that selects this rank's rows from NorMuon's factors of all rows.
        """
        local, lr = [local_part(p) for p in params], group["lr"]
        factors = None if squares is None else self._row_factors(group, params, squares)
        with undone_if(self.found_inf, local):
            for i, (p, part, update) in enumerate(zip(params, local, updates, strict=True)):
                wide = part.to(torch.promote_types(part.dtype, torch.float32))
                wide.mul_(1 - lr * group["weight_decay"])
                update = update.reshape(part.shape).to(wide)
                if factors is not None:
                    update.mul_(factors[i][rows[i]].to(update).unsqueeze(-1))
                wide.add_(update, alpha=-lr * _LR_SCALE[group["adjust_lr"]](*p.shape[-2:]))
                if wide is not part:
                    part.copy_(wide)

    def _row_factors(self, group: dict[str, Any], params: Sequence[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """Update NorMuon's averages v, and return the factors by which each update's rows are multiplied: fp32 (r,) or (E, r).

        Args:
            squares: `mean_squares` of each whole update.
        """
        averages = [local_part(self.state[p]["row_square"]) for p in params]
        averages = [average if average.ndim == 1 else average.squeeze(-1) for average in averages]  # (r,), or (E, r)
        factors = []
        with undone_if(self.found_inf, averages):
            for average, square in zip(averages, squares, strict=True):
                average.lerp_(square.to(average), 1 - group["normuon_beta2"])
                square = square.to(average.device)
                factor = 1 / (average.float().sqrt() + 1e-8)
                norm = (square * factor.square()).sum(-1, keepdim=True).sqrt()  # over √columns, as is the norm below
                factors.append(factor * (square.sum(-1, keepdim=True).sqrt() / norm.clamp(min=1e-30)))
        return factors

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


def mean_squares(update: Tensor) -> Tensor:
    """Return the mean square of each row of a matrix (r, c) or of matrices (E, r, c), in fp32: (r,) or (E, r)."""
    return torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).square() / update.size(-1)


_MUON_DIMENSIONS = {"matrix": 2, "projection": 2, "experts": 3}
"""Name of a parameter group → number of dimensions of the parameters in this group that Muon updates."""

_LR_SCALE: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
