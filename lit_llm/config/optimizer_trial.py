"""Run one step of the recipe's optimizer on small parameters, to find early that a step fails or its state cannot be saved."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from lit_llm.config.parse_errors import is_mistake
from lit_llm.core.errors import first_line
from lit_llm.distributed.mesh_strategy import MeshStrategy

MakeOptimizer = Callable[[Iterable[dict[str, Any]]], Optimizer]
Distribute = Callable[[Tensor, Placement], Tensor]
_INSTEAD = "AdamW, Lion and MuonAdamW do (--optimizer AdamW, or --trainer.strategy ddp)"


def optimizer_problems(strategy: object, make_optimizer: MakeOptimizer, class_path: str) -> list[str]:
    """Return [a sentence] if the optimizer cannot make a step with `strategy`, or if a checkpoint cannot restore its state.

    Return [] otherwise. `class_path`: the optimizer's class, for the sentence.
    """
    name = class_path.rpartition(".")[2]
    state, reason = _step(make_optimizer, lambda whole, _: whole)
    if reason is not None:
        return [f"{name} cannot train this model: {reason} (--optimizer AdamW)"]
    if (kind := _not_restorable(state)) is not None:
        return [f"{name} keeps its state in {kind}, which a checkpoint cannot restore (--optimizer AdamW)"]
    if not isinstance(strategy, MeshStrategy) or dist.is_initialized():  # no process group exists yet when `fit` starts
        return []
    with _mesh_of_this_process() as mesh:
        state, reason = _step(make_optimizer, lambda whole, where: DTensor.from_local(whole, mesh, [where], run_check=False))
    if reason is not None:
        return [f"{name} does not work on distributed parameters: {_INSTEAD}"]
    for value in state:
        if isinstance(value, DTensor) and type(local := value.to_local()) is not Tensor:
            return [
                f"{name} keeps its state in {type(local).__name__}, which distributed parameters do not support: {_INSTEAD}"
            ]
    return []


def _step(make_optimizer: MakeOptimizer, distribute: Distribute) -> tuple[list[Any], str | None]:
    """Return (values of the optimizer's state after one step, why the step failed or None).

    `distribute`: function (tensor, placement) that returns a DTensor, or the tensor itself.
    """

    def parameter(shape: tuple[int, ...], where: Placement) -> nn.Parameter:
        value = nn.Parameter(distribute(torch.full(shape, 0.5), where))
        value.grad = distribute(torch.full(shape, 0.25), where)
        return value

    # Both ways to shard a matrix. The matrices have at least 4096 values, so that torchao's optimizers compress their state.
    matrices = [parameter((64, 128), Shard(0)), parameter((64, 128), Shard(1))]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "name": "matrix"},
        {"params": [parameter((64,), Shard(0))], "name": "vector", "weight_decay": 0.0},
    ]
    try:
        optimizer = make_optimizer(groups)
        for group in optimizer.param_groups:
            if group.get("capturable"):  # for CUDA only, and these parameters are on the CPU
                group["capturable"] = False
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=[]):
            optimizer.step(lambda: 0.0)
    except Exception as error:  # optimizers, also users', raise many types
        if not is_mistake(error):
            raise
        return [], first_line(error)
    return [value for state in optimizer.state.values() for value in state.values()], None


def _not_restorable(state: list[Any]) -> str | None:
    """Return the class name of the first value in `state` that `torch.load(weights_only=True)` cannot restore, or None."""
    for value in state:
        file = io.BytesIO()
        with contextlib.suppress(Exception):  # pickle and torch raise many types
            torch.save(value, file)
            file.seek(0)
            if type(torch.load(file, weights_only=True)) is type(value):
                continue
        return type(value).__name__
    return None


@contextlib.contextmanager
def _mesh_of_this_process() -> Iterator[DeviceMesh]:
    """Yield a CPU device mesh of this process alone. The process group of the mesh is destroyed afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
