"""The parallel layout of a Trainer strategy, and the reasons why the layout cannot train a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

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


def layout_problems(
    strategy: Any,
    layout: Layout,
    model: GPTConfig | None,
    architecture: Architecture | None = None,
    compute: ComputeConfig | None = None,
    precision: str = "32-true",
    loss: LossConfig | None = None,
) -> list[str]:
    """Return a sentence for each reason why a MeshStrategy cannot train the model in its `layout`; [] for other strategies."""
    if not isinstance(strategy, MeshStrategy):
        return []
    checked = model if model is not None and not model.problems() else None
    problems = model_problems(layout, checked, architecture, compute, precision, loss.chunk_size if loss else None)
    return _unused_settings(strategy) + problems


def layout_of(strategy: Any, devices: int, devices_per_node: int) -> Layout:
    """The parallel layout of a Trainer strategy, given as an object or a name, on `devices` devices.

    Raises:
        UserError: the strategy is not known to train one model on several devices, or its mesh does not fit their number.
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
        if devices == 1:
            return Layout()
        # ModelParallelStrategy, for example, shards nothing by itself: it would train replicas that drift apart.
        raise UserError(
            f"{type(strategy).__name__} is not known to train one model on {devices} processes; use ddp or "
            "lit_llm.distributed.mesh_strategy.MeshStrategy (--config recipes/strategy/ddp.yaml or fsdp2.yaml)"
        )
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
