"""What a plan reads of a run: its own objects and numbers, under the names that they have in the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lit_llm.core.batch_sizes import Stages, batch_problem, micro_batch, sequences_before
from lit_llm.core.errors import UserError
from lit_llm.core.hardware import Hardware
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.keep_rule import sharded_dimension
from lit_llm.distributed.layout_problems import model_problems
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_order import StageShare, shares
from lit_llm.models.config import GPTConfig
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.weights import OwnModel, PlannedModel, Weight, Weights, weights_of, weights_of_stages

if TYPE_CHECKING:  # these import torch
    import torch

    from lit_llm.data.mixture_order import PhaseDraws
    from lit_llm.models.lora import LoRAConfig
    from lit_llm.models.loss import LossConfig, LossHead

BYTES = {  # Trainer precision -> bytes per weight, bytes per operand of a matrix product
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
}
CHECKPOINTING = ("none", "cheap", "attention", "full")


@dataclass(frozen=True)
class DataFacts:
    """Size of the dataset in tokens. `origin`: how the size is known: "counted …", "estimated …", or "unknown" (sizes None).

    `phases`: for each phase of a mixture, its draws from the sources. `sequences`: number of sequences in one epoch of packed
    documents; None: unknown, or not packed. `packing`: a sentence about the effect of packing on documents.
    """

    train_tokens: int | None = None
    val_tokens: int | None = None
    origin: str = "unknown"
    phases: tuple[PhaseDraws, ...] = ()
    sequences: int | None = None
    packing: str = ""


@dataclass(frozen=True)
class Schedule:
    """The learning-rate schedule.

    `kind`: its class name. `rate`: function from a step to its rate, if the peak rate is 1 (None: not known). `rates`: function
    from a step to {curve: its rate}, with curves such as `lr` (None: not known).
    """

    kind: str = "Cosine"
    rate: Callable[[int], float] | None = None
    rates: Callable[[int], dict[str, float]] | None = None


def _plain_loss() -> LossConfig:
    from lit_llm.models.loss import LossConfig  # imports torch

    return LossConfig()


@dataclass(frozen=True)
class PlannedRun:
    """A run, as far as memory, time and cost depend on it. Each field has the name and the unit that a recipe has for it.

    Attributes:
        loss_head, uses_reference: the attributes with these names of the recipe's objective (`lit_llm.training.objective`).
        validation_every_n_steps: optimizer steps between two validations. None: there are none.
        checkpoint_every_n_steps: optimizer steps between two checkpoints. None: there are none.
        ramp: the stages of a BatchRamp, (first step, sequences of a step) each; the last stage has `global_batch_size`.
            `tokens` follows the ramp; `accumulation` and `tokens_per_step` describe the final batch. (): a constant batch.
        block_size: tokens of a sequence. None: the model's block size.
        ema: whether an average of the weights is kept (`lit_llm.callbacks.EMA`).
    """

    model: PlannedModel
    optimizer: Optimizer
    max_steps: int
    global_batch_size: int
    micro_batch_size: int | None = None
    precision: str = "32-true"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    layout: Layout = field(default_factory=Layout)
    loss: LossConfig = field(default_factory=_plain_loss)
    loss_head: LossHead = "cross-entropy"
    uses_reference: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    validation_every_n_steps: int | None = None
    checkpoint_every_n_steps: int | None = None
    checkpoint_keep_last: int = 1
    async_checkpoints: bool | Literal["auto"] = "auto"
    sharded_checkpoints: bool | Literal["auto"] = "auto"
    data: DataFacts = field(default_factory=DataFacts)
    ramp: Stages = ()
    lora: LoRAConfig | None = None
    block_size: int | None = None
    ema: bool = False

    @classmethod
    def of(
        cls,
        parts: Mapping[str, Any],
        model: PlannedModel,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        precision: Any,
        max_steps: int,
        **others: Any,
    ) -> PlannedRun:
        """Return the planner's view of a run whose objects are built.

        Args:
            parts: the run's objects by group of the recipe: at least data, loss and compute.
            optimizer: the run's optimizer; its parameters do not matter.
            others: values of further fields.

        Raises:
            UserError: the planner does not know the precision.
        """
        data, schedule, checkpoint = parts["data"], parts.get("schedule"), parts.get("checkpoint")
        block_size, ramp = getattr(data, "block_size", None) or model.block_size, getattr(data, "ramp", None)
        objective = parts.get("objective")
        return cls(
            model,
            Optimizer.of(optimizer),
            max_steps,
            getattr(data, "global_batch_size", None) or 1,
            getattr(data, "micro_batch_size", None),
            canonical_precision(precision),
            parts["compute"],
            layout,
            parts["loss"],
            loss_head=getattr(objective, "loss_head", "cross-entropy"),
            uses_reference=getattr(objective, "uses_reference", False),
            schedule=Schedule("Constant" if schedule is None else type(schedule).__name__),
            validation_every_n_steps=getattr(parts.get("validation"), "every_n_steps", None),
            checkpoint_every_n_steps=getattr(checkpoint, "every_n_steps", None),
            checkpoint_keep_last=getattr(checkpoint, "keep_last", 1),
            ramp=() if ramp is None else ramp.sequences(block_size),
            lora=parts.get("lora"),
            block_size=block_size,
            ema=parts.get("ema") is not None,
            **others,
        )

    @property
    def reference_pass(self) -> bool:
        """Whether each micro-batch has one more forward pass, without gradients (`lit_llm.training.reference`)."""
        return self.uses_reference and self.lora is not None

    @property
    def gpt(self) -> GPTConfig:
        """The model, for code that only a GPT reaches: `problems` refuses the settings of such code for other models."""
        assert isinstance(self.model, GPTConfig)
        return self.model

    @property
    def sizes(self) -> tuple[int, int]:
        """(bytes of a stored weight, 4 for fp32 masters; bytes of an operand of a matrix product, fewer under autocast)."""
        return BYTES[self.precision]

    @property
    def weight_bytes(self) -> int:
        return self.sizes[0]

    @property
    def weights(self) -> Weights:
        """The weights of all stages of a pipeline, as tensor and expert parallelism split them for a rank.

        `Weight.share` of experts is that of the rank that has most of them, if ranks cannot share them equally.
        """
        weights = weights_of(self.model, self.lora, self.layout.tensor_parallel, self.layout.expert)
        ranks = self.layout.divisor("parameters")

        def share(weight: Weight) -> float:
            holders = self.holders(ranks)
            size = weight.shape[sharded_dimension(weight.shape, holders)]
            return -(-size // holders) * ranks / size

        return tuple(replace(w, share=share(w)) if w.experts and self.layout.strategy != "single" else w for w in weights)

    def pipeline_stages(self, rank: int) -> tuple[StageShare, ...]:
        """The stages of a pipeline rank; without a pipeline, one stage that has all layers."""
        return shares(self.layout.pipeline, self.gpt.n_layer, rank, self.gpt.predict_ahead)

    def weights_of_rank(self, rank: int, *, whole: bool = False) -> Weights:
        """The weights of a pipeline rank's stages, as tensor and expert parallelism split them, or with `whole`, not split."""
        weights = weights_of(self.model, self.lora) if whole else self.weights
        return weights if self.layout.pipeline.ranks == 1 else weights_of_stages(weights, self.pipeline_stages(rank))

    def holders(self, ranks: int) -> int:
        """Return how many ranks share the same experts by FSDP2, if `ranks` ranks share the other weights."""
        return ranks * self.layout.tensor_parallel // self.layout.expert

    @property
    def experts_apart(self) -> bool:
        """Whether FSDP2 shards experts over other ranks than the other weights (a device mesh of their own)."""
        has_experts = isinstance(self.model, GPTConfig) and self.model.moe is not None
        return has_experts and (self.layout.expert > 1 or self.layout.tensor_parallel > 1)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.block_size or self.model.block_size

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on a rank, padded as in `GPT.view`: one chunk, or two chunks if context ranks gather keys."""
        layout = self.layout
        chunks = 2 if layout.context > 1 and layout.context_attention == "gather" else 1
        multiple = chunks * layout.context * layout.tensor_parallel
        return -(-self.sequence_length // multiple) * multiple // layout.context

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch on one rank."""
        return self.sequences_of(self.global_batch_size)

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.sequences * self.layout.data_parallel)

    def sequences_of(self, batch: int) -> int:
        """Sequences of a micro-batch on one rank in a step of `batch` sequences; 0 if the ranks cannot share the step."""
        return micro_batch(batch, self.micro_batch_size, self.layout.data_parallel, self.layout.pipeline)

    @property
    def micro_batches(self) -> dict[int, int]:
        """{size of a micro-batch in sequences: the most micro-batches of this size in a step}. The stages of a ramp may have
        several sizes; size 0: the ranks cannot share the step of a stage."""
        most: dict[int, int] = {}
        for _, batch in self.stages:
            size = self.sequences_of(batch)
            most[size] = max(most.get(size, 0), batch // (max(1, size) * self.layout.data_parallel))
        return most

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_before(self.max_steps)

    @property
    def stages(self) -> Stages:
        """The stages of the ramp; a constant batch has one stage."""
        return self.ramp or ((0, self.global_batch_size),)

    def dense_peak(self, hardware: Hardware) -> float | None:
        """The dense peak of the run's matrix products in TFLOP/s, or None if it is unknown."""
        return hardware.peak_for(self.precision, self.compute.matmul_precision)

    def offloads(self, *, cuda: bool) -> bool:
        """Whether `cpu_offload` keeps weights, gradients and optimizer state in host memory. It has no effect without a GPU."""
        return cuda and self.layout.cpu_offload

    def changed(self, group: Literal["compute", "loss", "layout"], **values: Any) -> PlannedRun:
        """Return this run with other values in one of its groups of settings."""
        return replace(self, **{group: replace(getattr(self, group), **values)})

    def tokens_before(self, step: int) -> int:
        """Tokens in the first `step` steps."""
        return sequences_before(self.stages, step) * self.sequence_length

    def problems(self) -> list[str]:
        """Return one sentence, as `fit` says it, for each reason why the ranks cannot share the model or the batch, or why a
        custom model cannot have a setting.

        Raises:
            UserError: a custom model cannot be built.
        """
        layout, pipeline, length = self.layout, self.layout.pipeline, self.sequence_length
        gpt, own = (None, self.model) if isinstance(self.model, OwnModel) else (self.model, None)
        problems = pipeline.problems() if pipeline.ranks > 1 else []
        problems += model_problems(
            gpt,
            None if own is None else own.architecture,
            layout.sizes,
            pipeline,
            layout.context_attention,
            layout.expert,
            self.compute,
            self.precision,
            self.loss.chunk_size,
            reshards=not layout.kept.weights and layout.sizes.data_parallel * layout.context > 1,
        )
        if own is not None:
            from lit_llm.models import custom  # imports torch

            problems += own.architecture.problems(GPTConfig(), self.loss.chunk_size, self.compute)
            if self.compute.activation_checkpointing != "none" and all(weight.block is None for weight in weights_of(own)):
                problems.append(custom.blocks_problem(own.architecture.class_path, ["compute.activation_checkpointing"]))
        batches: dict[int, int | None] = {size * length: length for _, size in self.ramp} or {self.global_batch_size: None}
        most, ranks = self.micro_batch_size, layout.data_parallel
        shared = (batch_problem(size, most, ranks, pipeline, length=unit) for size, unit in batches.items())
        return [*problems, *filter(None, shared)]


def canonical_precision(value: Any) -> str:
    """A Trainer precision with Lightning's short forms spelled out.

    Raises:
        UserError: the bytes per element are unknown for this precision.
    """
    short = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    precision = short.get(str(value), str(value))
    if precision not in BYTES:
        raise UserError(f"Cannot plan for precision {value}: use {', '.join(BYTES)} (--trainer.precision).")
    return precision
