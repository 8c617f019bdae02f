"""Run the stages of a rank by a pipeline schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lit_llm.core.errors import UserError
from lit_llm.distributed.pipeline_layers import KINDS
from lit_llm.distributed.pipeline_transfer import Transfer
from lit_llm.models.loss import LossSums

Objective = Callable[[LossSums], Tensor]
"""Maps the loss sums of a micro-batch to the scalar that is differentiated."""


class ScheduleRunner:
    """Runs the forward and backward passes of one optimizer step in each call of `run`.

    A schedule of torch is made for a number of micro-batches of one shape. Only the newest schedule is kept, because each
    schedule has a buffer per micro-batch, and a batch ramp rarely changes the number of micro-batches.
    """

    def __init__(self, stages: Sequence[nn.Module], transfer: Transfer) -> None:
        self._modules, self._transfer = stages, transfer
        self._made_for: tuple[Any, ...] | None = None
        self._stages: list[_Stage] = []
        self._schedule: Any = None

    def run(
        self,
        arguments: list[dict[str, Any]],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run forward and backward passes of all micro-batches, and add their gradients to the parameters' gradients.

        Args:
            arguments: for each micro-batch, the stages' keyword arguments. The last stage returns the scalar to differentiate.
            shape, dtype: shape and dtype of the activations between stages.

        Raises:
            UserError: if the schedule does not work with this number of micro-batches.
        """
        device = arguments[0]["input_ids"].device
        made_for = (len(arguments), shape, dtype, device)
        if made_for != self._made_for:
            self._make(len(arguments), shape, dtype, device)
            self._made_for = made_for
        for stage in self._stages:
            stage.arguments, stage.forward_context = arguments, forward_context
        # torch counts micro-batches by splitting `target`. The stages take everything else from `arguments`.
        self._schedule.step(target=torch.empty(len(arguments)), return_outputs=False)
        for stage in self._stages:
            stage.arguments = []

    def _make(self, micro_batches: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        layout = self._transfer.layout
        if not layout.runs(micro_batches):  # the sizes were checked before the run, but an epoch may end within a step
            raise UserError(layout.needs(micro_batches))
        moved = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        scalar = torch.empty((), dtype=dtype, device="meta", requires_grad=True)
        self._stages = [
            _Stage(
                module,
                number,
                layout.stages,
                device,
                input_args=() if number == 0 else moved,
                output_args=scalar if number == layout.stages - 1 else moved,
                group=self._transfer.group,
            )
            for module, number in zip(self._modules, self._transfer.stages, strict=True)
        ]
        kind = KINDS[layout.schedule]
        make = get_schedule_class(kind.torch_name)
        stages: Any = self._stages[0] if kind.stages == 1 else self._stages
        # The objective divides by the number of micro-batches itself, as on one process.
        self._schedule = make(stages, micro_batches, loss_fn=_the_output, scale_grads=False)


class _Stage(PipelineStage):
    """torch's PipelineStage, but its forward pass of micro-batch i gets `arguments[i]`, and runs in `forward_context()`."""

    arguments: list[dict[str, Any]]
    forward_context: Callable[[], AbstractContextManager[Any]]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        with self.forward_context():
            return super().forward_one_chunk(fwd_chunk_id, args, self.arguments[fwd_chunk_id], save_forward_output)


def _the_output(output: Tensor, target: Tensor) -> Tensor:
    """The loss function for torch's schedule: the output itself, because the last stage returns its loss."""
    return output
