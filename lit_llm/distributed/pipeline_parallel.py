"""Pipeline parallelism of a GPT: each rank has some of the layers, and activations move from stage to stage.

A LightningModule and `MeshStrategy` use only `PipelinedGPT`, which runs micro-batches, maps parameters and optimizer groups to
those of the whole model, and knows which parameters another rank has, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_llm.checkpoint.stages import number_as_own, number_as_whole
from lit_llm.core._torch import IGNORED
from lit_llm.core.dtensor import local_part
from lit_llm.core.errors import refuse
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_schedule import Objective, ScheduleRunner
from lit_llm.distributed.pipeline_transfer import Transfer
from lit_llm.models.dropout import new_seed
from lit_llm.models.gpt import GPT, LossFunction, View
from lit_llm.models.loss import LossSums, cross_entropy, with_routers
from lit_llm.models.router import RouterSums

StageObjective = Callable[..., Tensor]
"""A function that maps loss sums and `last` (whether the last stage computed them) to the scalar to differentiate."""


class Stage(nn.Module):
    """A stage of a pipeline: consecutive blocks of a GPT. The first stage also has the embedding, the last stage norm and head.

    A stage registers modules of the whole model as its own, so that FSDP2 sees these modules below one root. The names of
    parameters in checkpoints come from `PipelinedGPT`, which registers the same modules.
    """

    def __init__(self, whole: GPT, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self._whole = [whole]  # in a list: a module here would be registered
        self.layers, self.first, self.last = layers, first, last
        self.held = range(layers.start, whole.config.n_blocks) if last else layers
        """The numbers of the stage's blocks in the whole model, including the blocks that predict ahead."""
        self.ties_head = last and whole.ties_head
        self.embedding = whole.embedding if first or (last and whole.embeds_twice) else None
        self.positions = whole.positions if first else None
        self.blocks = nn.ModuleList(whole.blocks[i] for i in self.held)
        self.norm = whole.norm if last else None
        self.head = whole.head if last else None

    def forward(
        self,
        x: Tensor | None = None,
        *,
        input_ids: Tensor,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        loss: LossFunction = cross_entropy,
        objective: StageObjective | None = None,
        seed: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return the input of the next stage, (B, T, d). The last stage returns the result of `GPT.forward`, or of `objective`.

        Args:
            x: (B, T, d), the output of the previous stage for this rank's positions. None for the first stage.
            input_ids, documents, targets, loss, seed: as for `GPT.forward`. Every stage gets the whole batch.
            objective: in training, maps the loss sums, and whether this is the last stage, to the scalar to differentiate. In
                an earlier stage, only the sums of its routers are not 0; their gradient starts in this stage.
        """
        whole = self._whole[0]
        view = whole.view(input_ids, documents, seed=seed, shard=None if targets is None else whole.sequence_shard)
        if objective is not None:
            assert targets is not None
            view = whole.counting(view, targets)
        if self.first:
            x = whole.embed(view)
        assert x is not None
        x = whole.run_blocks(x, view, layers=self.layers)
        if not self.last:
            if view.counted is None:
                return x
            assert objective is not None and targets is not None
            zero, count = torch.zeros((), device=x.device), (targets != IGNORED).sum()  # as the last stage counts
            return _WithLoss.apply(x, objective(self._with_routers(LossSums(zero, zero, count), view), last=False))
        result = whole.finish(x, view, targets, loss)
        if objective is None:
            return result
        assert isinstance(result, LossSums)
        return objective(result if view.counted is None else self._with_routers(result, view), last=True)

    def _with_routers(self, sums: LossSums, view: View) -> LossSums:
        """Return `sums` with an entry for each router (of experts) of the whole model; zeros for routers of other stages."""
        whole, own = self._whole[0], iter(view.router_sums)
        moe = whole.config.moe
        assert moe is not None
        zero = torch.zeros((), device=sums.nll.device)
        none = RouterSums(zero, zero.new_zeros(moe.experts, dtype=torch.int64), zero, zero)
        with_experts = [i for i, layer in enumerate(whole.layers) if layer.experts]
        return with_routers(sums, [next(own) if i in self.held else none for i in with_experts])


class _WithLoss(Function):
    """Autograd function that returns `x` (B, T, d) unchanged, and in the backward pass gives the scalar `loss` gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.detach()  # not a view: schedules that split the backward pass detach outputs in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class PipelinedGPT(nn.Module):
    """This rank's part of a GPT whose layers are spread over a pipeline.

    Parameters have the same names as in the GPT. If the last stage needs the embedding too, the ranks of the first and of the
    last stage have a copy under the same name; `_sum_tied_gradients` keeps the copies equal.

    Args:
        whole: the whole GPT on the meta device, after the steps of `parallelize` that come before stages. The modules of other
            ranks stay on the meta device, without memory.
        mesh: the ranks of the pipeline.

    Raises:
        UserError: if the model has fewer layers than there are stages.
    """

    def __init__(self, whole: GPT, layout: PipelineLayout, mesh: DeviceMesh) -> None:
        super().__init__()
        refuse(layout.layer_problems(whole.config.n_layer))
        self.config = whole.config
        self._whole = [whole]  # in a list, so not registered: most modules belong to other ranks
        self._transfer = Transfer(layout, mesh.get_group(), mesh.get_local_rank())
        layers, stages = layout.layers(whole.config.n_layer), layout.stages
        self.stages = [  # a plain list, so that stages are not registered: their modules are registered below
            Stage(whole, layers[stage], first=stage == 0, last=stage == stages - 1)
            for stage in layout.stages_of(mesh.get_local_rank())
        ]
        names = {name for stage in self.stages for name, module in stage.named_children() if module is not None}
        self.embedding = whole.embedding if "embedding" in names else None
        self.positions = whole.positions if "positions" in names else None
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for stage in self.stages for i in stage.held})
        self.norm = whole.norm if "norm" in names else None
        self.head = whole.head if "head" in names else None
        self.rotary = whole.rotary
        self.window: list[dict[str, Tensor]] = []
        """The micro-batches of the current optimizer step. `train_step` runs all micro-batches and empties the list."""
        self.optimizer_groups: list[list[str]] = []
        """For each optimizer group, the names of its parameters in the whole model. This rank may have none of them."""
        self._runner = ScheduleRunner(self.stages, self._transfer)

    @property
    def whole(self) -> GPT:
        """The whole model. Modules of other ranks are on the meta device."""
        return self._whole[0]

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.stages[-1].last

    @property
    def vocabulary_shards(self) -> Any:
        """`GPT.vocabulary_shards` of the whole model: the split of the vocabulary over ranks; None without a split."""
        return self.whole.vocabulary_shards

    def init_weights(self) -> None:
        """(Re)initialise this rank's parameters and buffers with the values that they have on one process."""
        device = next(self.parameters()).device
        with torch.device(device):  # modules of other ranks are drawn there too, to keep the random stream
            self.whole.init_weights()

    def reshard(self) -> None:
        """In each stage, free the whole weights that FSDP2 keeps after `forward`, and leave the rank's own shards."""
        for stage in self.stages:
            if isinstance(stage, FSDPModule):
                stage.reshard()

    def num_parameters(self) -> int:
        """Number of parameters of the whole model. A tied matrix counts once."""
        return self.whole.num_parameters()

    # -- training ---------------------------------------------------------------------------------------------------

    def collect(self, batch: dict[str, Tensor]) -> Tensor:
        """Add a micro-batch to the list `window`, which `train_step` runs later. Returns a scalar 0 in place of its loss."""
        # The seed is drawn now, as on one process: `StepSeed` seeds the generator for each micro-batch.
        self.window.append({**batch, "seed": new_seed()} if self.whole.drops else batch)
        return torch.zeros((), device=batch["targets"].device)

    def train_step(
        self,
        *,
        loss: Callable[[dict[str, Tensor]], LossFunction],
        objective: Objective,
        record: Callable[[dict[str, Tensor], LossSums], object],
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run forward and backward passes of all micro-batches in `window`, and empty it. Gradients are added to `grad`.

        Args:
            loss: returns the loss function for a micro-batch.
            objective: maps the loss sums of a micro-batch to the scalar that is differentiated.
            record: called with each micro-batch and its loss sums on the rank with the last stage. If the model has experts,
                also called on other ranks, with the sums of the stage's routers and zeros for the loss.
            forward_context: entered around each forward pass, for autocast.
        """
        window, self.window = self.window, []
        self.whole.training = self.training  # not a submodule

        def collect(batch: dict[str, Tensor], sums: LossSums, *, last: bool) -> Tensor:
            kept = sums if last else _no_sums(batch["targets"])._replace(router=sums.router)  # targets are counted once
            record(batch, kept)
            return objective(sums)

        arguments = [
            {**_arguments(batch), "targets": batch["targets"], "loss": loss(batch), "objective": partial(collect, batch)}
            for batch in window
        ]
        self._runner.run(arguments, self._shape(window[0]["input_ids"], split=True), self._dtype, forward_context)
        self._sum_tied_gradients()

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of the embedding's copies on the ranks of the first and the last stage. Both ranks get the sum."""
        transfer = self._transfer
        if not self.whole.embeds_twice or self.embedding is None or transfer.first_rank == transfer.last_rank:
            return
        weight = self.embedding.weight
        if weight.grad is None:
            return
        if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):  # tensor parallelism leaves the look-up's whole
            weight.grad = weight.grad.redistribute(placements=weight.placements)
        own = local_part(weight.grad)
        own.add_(transfer.exchange(own, transfer.last_rank if self.stages[0].first else transfer.first_rank))

    # -- checkpoints, which equal those of one process ----------------------------------------------------------------

    def repeated_parameters(self) -> set[Tensor]:
        """The set of this rank's parameters that an earlier rank of the pipeline has, too: the last stage's tied embedding."""
        transfer = self._transfer
        if not self.whole.embeds_twice or self.embedding is None or transfer.rank == transfer.first_rank:
            return set()
        return {self.embedding.weight}

    def whole_state_dict(self, prefix: str) -> dict[str, Tensor]:
        """The state dict of the whole model, on the meta device. `prefix` is put before each name."""
        state = self.whole.state_dict(prefix=prefix)
        return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state_dict of this rank's optimizer, with parameters numbered as in the optimizer of the whole model."""
        return number_as_whole(optimizer.state_dict(), self._names(optimizer), self.optimizer_groups)

    def own_optimizer_state(self, saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Make a state_dict of this rank's `optimizer` from `saved`, a saved state_dict of the whole model's optimizer."""
        return number_as_own(saved, self._names(optimizer), self.optimizer_groups)

    def _names(self, optimizer: Optimizer) -> list[list[str]]:
        """For each group of an optimizer, the names of its parameters in this module."""
        name = {parameter: name for name, parameter in self.named_parameters()}
        return [[name[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    # -- validation and text generation -----------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loss: LossFunction = cross_entropy,
        documents: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return the logits (B, T, V) on every rank. With targets, return the loss sums: zeros on ranks without the last stage.

        Batches overlap in the pipeline: a rank waits only for its input. No gradients. The arguments are as for `GPT.forward`.
        """
        self.whole.training = self.training
        shape, device = self._shape(input_ids, split=targets is not None), input_ids.device
        x: Any = None
        for stage, number in zip(self.stages, self._transfer.stages, strict=True):
            if not stage.first:
                x = self._transfer.receive(number, x, shape, self._dtype, device)
            x = stage(x, input_ids=input_ids, documents=documents, targets=targets, loss=loss)
            if not stage.last:
                self._transfer.send(number, x)
        if targets is not None:
            return x if self.has_last_stage else _no_sums(targets)
        if not self.has_last_stage:
            assert self.config.vocab_size is not None
            logits_dtype = torch.promote_types(self._dtype, torch.float32)
            x = torch.empty((*input_ids.shape, self.config.vocab_size), dtype=logits_dtype, device=device)
        return self._transfer.broadcast_from_last(x)

    def _shape(self, input_ids: Tensor, *, split: bool) -> tuple[int, int, int]:
        """Shape (B, positions, d) of the activations between stages on this rank, for ids (B, T).

        `split`: whether there are targets, because only then context-parallel ranks share each sequence.
        """
        batch, length = input_ids.shape
        return batch, self.whole.stream_length(length, split=split), self.config.n_embd

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the residual stream, which is the parameters' dtype, also under autocast."""
        return next(self.parameters()).dtype


def _arguments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "documents", "seed") if name in batch}


def _no_sums(targets: Tensor) -> LossSums:
    zero, zeros = torch.zeros((), device=targets.device), torch.zeros(targets.size(0), device=targets.device)
    return LossSums(zero, zero, zero.long(), zeros, zeros.long())


def pipelined_part(module: nn.Module) -> tuple[str, PipelinedGPT] | None:
    """Find the PipelinedGPT among the modules inside `module`. Return (prefix of its names in the state dict, it), or None."""
    return next(((f"{name}.", part) for name, part in module.named_modules() if isinstance(part, PipelinedGPT)), None)
