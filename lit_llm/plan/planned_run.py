"""The description of a run from which a plan is computed: settings with the names that they have in the recipe."""

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
    """Record of the size of the dataset.

    Attributes:
        train_tokens, val_tokens: tokens of the training and the validation split. None: unknown.
        origin: how the sizes are known: "counted …", "estimated …", or "unknown".
        phases: for each phase of a mixture, how much the phase reads of each source. (): no mixture.
        sequences: number of sequences in one epoch of packed documents. None: unknown, or documents are not packed.
        packing: a sentence about the effect of packing on documents.
    """

    train_tokens: int | None = None
    val_tokens: int | None = None
    origin: str = "unknown"
    phases: tuple[PhaseDraws, ...] = ()
    sequences: int | None = None
    packing: str = ""


@dataclass(frozen=True)
class Schedule:
    """Record of the learning-rate schedule.

    `kind`: the schedule's class name. `rate`: function from a step to the learning rate if the peak rate is 1 (None: unknown).
    `rates`: function from a step to {logged curve, such as lr: learning rate} (None: unknown).
    """

    kind: str = "Cosine"
    rate: Callable[[int], float] | None = None
    rates: Callable[[int], dict[str, float]] | None = None


def _plain_loss() -> LossConfig:
    from lit_llm.models.loss import LossConfig  # imports torch

    return LossConfig()


@dataclass(frozen=True)
class PlannedRun:
    """Record of a run's settings on which memory, time and cost depend. Fields have the names and units of the recipe's keys.

    Attributes:
        loss_head, uses_reference: the attributes with these names of the recipe's objective (`lit_llm.training.objective`).
        validation_every_n_steps: optimizer steps between two validations. None: no validation.
        checkpoint_every_n_steps: optimizer steps between two checkpoints. None: no checkpoints.
        ramp: the stages of a BatchRamp, (first step, sequences of a step) each; the last stage has `global_batch_size`.
            `tokens` follows the ramp; `accumulation` and `tokens_per_step` describe the final batch. (): a constant batch.
        block_size: tokens of a sequence. None: the model's block size.
        ema: whether the run keeps an exponential moving average of the weights (`lit_llm.callbacks.EMA`).
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
        """Return the `PlannedRun` of a run whose objects are built.

        Args:
            parts: {group of the recipe: object}, with at least the groups data, loss and compute.
            optimizer: the run's optimizer; only its class and options are read.
            precision: `Trainer.precision`.
            others: values of further fields of `PlannedRun`.

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
        """Whether each micro-batch has a second forward pass, of the reference model (`lit_llm.training.reference`)."""
        return self.uses_reference and self.lora is not None

    @property
    def gpt(self) -> GPTConfig:
        """`model` as a `GPTConfig`. For other models, `problems` refuses the settings whose code reads this property."""
        assert isinstance(self.model, GPTConfig)
        return self.model

    @property
    def sizes(self) -> tuple[int, int]:
        """(bytes of an element of a stored weight, bytes of an element in a matrix product): (4, 2) under bf16 autocast."""
        return BYTES[self.precision]

    @property
    def weight_bytes(self) -> int:
        return self.sizes[0]

    @property
    def weights(self) -> Weights:
        """The weights of all pipeline stages, with the shapes that tensor and expert parallelism leave to a rank.

        If ranks cannot share the experts equally, `Weight.share` of experts is the share of the rank with most experts.
        """
        weights = weights_of(self.model, self.lora, self.layout.tensor_parallel, self.layout.expert)
        ranks = self.layout.divisor("parameters")

        def share(weight: Weight) -> float:
            holders = self.holders(ranks)
            size = weight.shape[sharded_dimension(weight.shape, holders)]
            return -(-size // holders) * ranks / size

        return tuple(replace(w, share=share(w)) if w.experts and self.layout.strategy != "single" else w for w in weights)

    def pipeline_stages(self, rank: int) -> tuple[StageShare, ...]:
        """Return the stages of pipeline rank `rank`; without a pipeline, one stage that has all layers."""
        return shares(self.layout.pipeline, self.gpt.n_layer, rank, self.gpt.predict_ahead)

    def weights_of_rank(self, rank: int, *, whole: bool = False) -> Weights:
        """Return the weights in the stages of pipeline rank `rank`: a tensor- and expert-parallel rank's part of each weight,
        or with `whole` the unsplit weights."""
        weights = weights_of(self.model, self.lora) if whole else self.weights
        return weights if self.layout.pipeline.ranks == 1 else weights_of_stages(weights, self.pipeline_stages(rank))

    def holders(self, ranks: int) -> int:
        """Return among how many ranks FSDP2 shards each expert, if FSDP2 shards the other weights among `ranks` ranks."""
        return ranks * self.layout.tensor_parallel // self.layout.expert

    @property
    def experts_apart(self) -> bool:
        """Whether FSDP2 shards experts on another device mesh than the other weights."""
        has_experts = isinstance(self.model, GPTConfig) and self.model.moe is not None
        return has_experts and (self.layout.expert > 1 or self.layout.tensor_parallel > 1)

    @property
    def sequence_length(self) -> int:
        """Number of tokens of a sequence."""
        return self.block_size or self.model.block_size

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on a context-parallel rank. `GPT.view` pads a sequence to a multiple of the number of context-
        and tensor-parallel ranks that share it, or of twice this number if context ranks gather keys."""
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
        """Return the sequences of a rank's micro-batch in a step of `batch` sequences; 0 if the ranks cannot share the step."""
        return micro_batch(batch, self.micro_batch_size, self.layout.data_parallel, self.layout.pipeline)

    @property
    def micro_batches(self) -> dict[int, int]:
        """{sequences of a micro-batch: the most micro-batches of this size in a step}. The stages of a batch ramp may have
        different sizes. Size 0: the ranks cannot share the step of a stage."""
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
        """The stages of the batch ramp, (first step, sequences of a step) each; a constant batch has one stage."""
        return self.ramp or ((0, self.global_batch_size),)

    def dense_peak(self, hardware: Hardware) -> float | None:
        """Return the dense peak of `hardware` in TFLOP/s for the run's matrix products, or None if the peak is unknown."""
        return hardware.peak_for(self.precision, self.compute.matmul_precision)

    def offloads(self, *, cuda: bool) -> bool:
        """Whether `cpu_offload` keeps weights, gradients and optimizer state in host memory. Always False without a GPU."""
        return cuda and self.layout.cpu_offload

    def changed(self, group: Literal["compute", "loss", "layout"], **values: Any) -> PlannedRun:
        """Return a copy of this run with the fields `values` changed in its settings group `group`."""
        return replace(self, **{group: replace(getattr(self, group), **values)})

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps."""
        return sequences_before(self.stages, step) * self.sequence_length

    def problems(self) -> list[str]:
        """Return sentences: why `fit` would refuse the run, because the ranks cannot share the model or the batch, or
        a custom model cannot have a setting.

        Raises:
            UserError: the custom model cannot be built.
        """
        layout, pipeline, length = self.layout, self.layout.pipeline, self.sequence_length
        gpt, own = (None, self.model) if isinstance(self.model, OwnModel) else (self.model, None)
        problems = pipeline.problems() if pipeline.ranks > 1 else []
        architecture = None if own is None else own.architecture
        problems += model_problems(layout, gpt, architecture, self.compute, self.precision, self.loss.chunk_size)
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
    """Return a Trainer precision in Lightning's long form: "bf16-mixed" for "bf16".

    Raises:
        UserError: the bytes per element are unknown for this precision.
    """
    short = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    precision = short.get(str(value), str(value))
    if precision not in BYTES:
        raise UserError(f"Cannot plan for precision {value}: use {', '.join(BYTES)} (--trainer.precision).")
    return precision
