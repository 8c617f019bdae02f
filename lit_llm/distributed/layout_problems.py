"""Why a model cannot be trained by a layout, one sentence each, before any process starts.

Of tensor and context parallelism, only what convolutions need; the rest is beside the code that applies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_llm.core.mesh_sizes import MeshSizes
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout
from lit_llm.models.config import GPTConfig

if TYPE_CHECKING:  # imports torch
    from lit_llm.models.custom import Architecture

_ONE_PASS = "--trainer.strategy.schedule 1f1b or interleaved1f1b"


def pipeline_problems(
    layout: PipelineLayout,
    sizes: MeshSizes,
    model: GPTConfig | None,
    architecture: Architecture | None,
    compute: ComputeConfig | None,
    precision: str,
    chunk_size: int | None,
    reshards: bool,
) -> list[str]:
    """Every reason why the settings do not work with a pipeline.

    Args:
        model: None or invalid: not checked.
        architecture: of a custom model.
        chunk_size: of the loss.
        reshards: whether FSDP2 frees gathered weights after each forward pass.
    """
    if layout.ranks == 1:
        return []
    if architecture is not None:
        return [
            f"pipeline={layout.ranks} works with lit_llm's GPT only, because {architecture.class_path} cannot be cut between "
            "its layers; use shards instead (--trainer.strategy.pipeline 1, --config recipes/strategy/fsdp2.yaml)"
        ]
    kind, found = KINDS[layout.schedule], []
    named = f"trainer.strategy.schedule is {layout.schedule}, which computes gradients of weights later,"
    if model is not None and not model.problems():
        found += layout.layer_problems(model.n_layer)
        if kind.folds and model.tie_embeddings:
            found.append(
                f"trainer.strategy.schedule is {layout.schedule}, which puts the first and the last stage on one rank, but the "
                f"embedding is tied ({_ONE_PASS}, or --model.tie_embeddings false)"
            )
    if precision == "16-mixed":
        found.append(loss_scale_problem(layout.ranks))
    if kind.splits_backward:
        if compute is not None and compute.compile:
            found.append(f"{named} but compiled blocks compute both at once ({_ONE_PASS}, or --compute.compile false)")
        if compute is not None and compute.activation_checkpointing == "cheap":
            found.append(
                f"{named} but what compute.activation_checkpointing cheap keeps serves one gradient only ({_ONE_PASS}, or "
                "--compute.activation_checkpointing full)"
            )
        if chunk_size is not None:
            found.append(f"{named} but a loss in chunks computes both at once ({_ONE_PASS}, or --loss.chunk_size null)")
        if sizes.tensor_parallel > 1:
            found.append(
                f"{named} but the loss of tensor_parallel={sizes.tensor_parallel} computes both at once ({_ONE_PASS}, or "
                "--trainer.strategy.tensor_parallel 1)"
            )
        if reshards:  # torch looks for the whole weights before the backward pass gathers them
            found.append(
                f"{named} but reshard_after_forward true frees the weights before ({_ONE_PASS}, or "
                "--trainer.strategy.reshard_after_forward false)"
            )
    return found


def compile_problem(tensor_parallel: int, compute: ComputeConfig) -> str | None:
    """Why compiled blocks do not work with tensor parallelism: torch 2.13 cannot keep a mesh for a recomputed pass."""
    mode = compute.activation_checkpointing
    if tensor_parallel == 1 or not compute.compile or mode in ("none", "cheap"):
        return None
    return (
        f"compute.activation_checkpointing is {mode}, which torch cannot compile with tensor_parallel={tensor_parallel} "
        "(--compute.activation_checkpointing cheap or none, or --compute.compile false)"
    )


def clip_problem(pipeline: int, clip: float | None) -> str | None:
    """Why the Trainer cannot clip gradients of so many pipeline ranks: Lightning would clip each stage by its own norm."""
    if pipeline == 1 or clip is None:
        return None
    return (
        f"trainer.gradient_clip_val is {clip}, but the norm of pipeline={pipeline} spans its stages "
        f"(--gradient_norm GradientNorm --gradient_norm.clip {clip}, and --trainer.gradient_clip_val null)"
    )


def loss_scale_problem(pipeline: int) -> str:
    """Why so many pipeline ranks cannot use a loss scale."""
    return (
        f"trainer.precision is 16-mixed, but the stages of pipeline={pipeline} do not share a loss scale "
        "(--trainer.precision bf16-mixed)"
    )


def experts_problems(config: GPTConfig, sizes: MeshSizes) -> list[str]:
    """Why a mixture of experts cannot be laid out so, one sentence for each size: data parallelism works."""
    if config.moe is None:
        return []
    asked = {name: size for name, size in sizes._asdict().items() if name in ("context", "tensor_parallel", "pipeline")}
    return [
        f"{name}={size} does not work with model.moe yet, but replicas and shards do (--trainer.strategy.{name} 1, "
        "--config recipes/strategy/fsdp2.yaml or ddp.yaml)"
        for name, size in asked.items()
        if size > 1
    ]


SHARED = {
    "context": ("each sequence", ("qkv_convolution", "input_convolution")),
    "tensor_parallel": ("the positions between matrices", ("input_convolution",)),
}
"""What ranks share, and the convolutions that it excludes, because these need the positions before each."""


def convolution_problems(config: GPTConfig, ranks: dict[str, int]) -> list[str]:
    """Every setting of a model that excludes this layout, one sentence each.

    Args:
        ranks: their number, by the names in `SHARED`.
    """
    return [
        f"{layout}={ranks[layout]} shares {what} among ranks, but model.{name}={getattr(config, name)} needs the positions "
        f"before each: use --model.{name} null, or --trainer.strategy.{layout} 1"
        for layout, (what, names) in SHARED.items()
        if ranks.get(layout, 1) > 1
        for name in names
        if getattr(config, name) is not None
    ]
