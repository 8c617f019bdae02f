"""The parallel layout of a Trainer strategy, and the reasons why a model cannot be trained in this layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy

from lit_llm.core._lightning import ddp_option
from lit_llm.core.errors import UserError
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout_problems import model_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallel_layout import Layout, layout_of_name, mesh_layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig


def layout(
    strategy: Strategy,
    world_size: int,
    model: GPTConfig | None,
    architecture: Architecture | None = None,
    compute: ComputeConfig | None = None,
    precision: str = "32-true",
    loss: LossConfig | None = None,
) -> tuple[int | None, list[str]]:
    """(number of data-parallel ranks, None if the mesh does not fit `world_size`; reasons why the model cannot be trained)."""
    if not isinstance(strategy, MeshStrategy):
        problems = []
        # ModelParallelStrategy, for example, shards nothing by itself: it would train replicas that drift apart.
        if world_size > 1 and not isinstance(strategy, DDPStrategy):
            problems.append(
                f"{type(strategy).__name__} is not known to train one model on {world_size} processes; use ddp or "
                "lit_llm.distributed.mesh_strategy.MeshStrategy (--config recipes/strategy/ddp.yaml or fsdp2.yaml)"
            )
        return world_size, problems
    try:
        sizes = strategy.sizes(world_size)
    except UserError as error:
        return None, [str(error)]
    problems = model_problems(
        model if model is not None and not model.problems() else None,
        architecture,
        sizes,
        strategy.pipeline_layout,
        strategy.context_attention,
        strategy.expert,
        compute,
        precision,
        loss.chunk_size if loss else None,
        reshards=strategy.reshard_after_forward is True,
    )
    return sizes.data_parallel, _unused_settings(strategy) + problems


def layout_of(strategy: Any, devices: int, devices_per_node: int) -> Layout:
    """The parallel layout of a Trainer strategy, given as an object or a name, on `devices` devices.

    Raises:
        UserError: the planner does not support the strategy, or its mesh does not fit the number of devices.
    """
    if isinstance(strategy, str):
        return layout_of_name(strategy, devices, devices_per_node)
    if isinstance(strategy, SingleDeviceStrategy):
        return layout_of_name("single", devices, devices_per_node)
    if isinstance(strategy, DDPStrategy):
        layout = layout_of_name("ddp", devices, devices_per_node)
        return replace(layout, bucket_copies=layout.bucket_copies and not ddp_option(strategy, "gradient_as_bucket_view"))
    if isinstance(strategy, FSDPStrategy):
        nodes = max(1, devices // devices_per_node)
        return replace(layout_of(MeshStrategy.from_fsdp1(strategy, nodes), devices, devices_per_node), strategy="fsdp")
    if not isinstance(strategy, MeshStrategy):
        raise UserError(f"the planner does not support {type(strategy).__name__} (--trainer.strategy)")
    return mesh_layout(
        strategy.sizes(devices),
        strategy.pipeline_layout,
        reshard_after_forward=strategy.reshard_after_forward,
        reduce_each_micro_batch=strategy.reduce_each_micro_batch,
        prefetch=strategy.prefetch,
        cpu_offload=strategy.cpu_offload,
        context_attention=strategy.context_attention,
        expert=strategy.expert,
    )


def _unused_settings(strategy: MeshStrategy) -> list[str]:
    """One sentence for each setting of a pipeline, or of context parallelism, in a layout without this parallelism."""
    settings: list[tuple[str, object, object, str]] = []
    if strategy.context == 1:
        settings.append(("context_attention", strategy.context_attention, "gather", "context"))
    if strategy.pipeline == 1:
        values = strategy.pipeline_layout._asdict()
        defaults = PipelineLayout(strategy.pipeline)._asdict()
        settings += [(name, values[name], default, "pipeline") for name, default in defaults.items()]
    return [
        f"{name} is {value}, but --trainer.strategy.{size} is 1, so it changes nothing: use at least 2, or remove it "
        f"(--trainer.strategy.{name} {'null' if default is None else default})"
        for name, value, default, size in settings
        if value != default
    ]
