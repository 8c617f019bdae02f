"""The settings of a run as plain numbers, taken from a parsed recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_llm.core.batch_sizes import batch_problem, micro_batch
from lit_llm.core.errors import UserError
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout_problems import convolution_problems, pipeline_problems
from lit_llm.models.config import GPTConfig
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.data_facts import DataFacts, Stages, sequences_before, steps_for
from lit_llm.plan.layout import Layout, class_of, devices_of, layout_from_strategy
from lit_llm.plan.optimizer import TORCH_MUON, Optimizer

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig

BYTES = {  # Trainer precision -> bytes per weight, bytes per operand of a matrix product
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
}
CHECKPOINTING = ("none", "cheap", "attention", "full")


@dataclass(frozen=True)
class Schedule:
    """The learning-rate schedule: its class name, and the rate of a step with a peak of 1 (None: not known)."""

    kind: str = "Cosine"
    rate: Callable[[int], float] | None = None


@dataclass(frozen=True)
class RunSettings:
    """A run. Batch sizes are in sequences, `steps` are optimizer steps.

    `length`: tokens of a sequence (`data.block_size`). None: the model's block size.

    `ema`: an average of the weights is kept (`lit_llm.callbacks.EMA`).

    `ramp`: the stages of a BatchRamp, pairs of (first step, sequences per step); the last stage has `global_batch`. Total
    tokens follow the ramp. `accumulation` and `tokens_per_step` describe the final batch.
    """

    model: GPTConfig
    optimizer: Optimizer
    steps: int
    global_batch: int
    micro_batch: int | None = None
    precision: str = "32-true"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    layout: Layout = field(default_factory=Layout)
    chunk_size: int | None = None
    z_loss: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    validate_every: int | None = None
    save_every: int | None = None
    keep_last: int = 1
    background_saves: bool = False
    data: DataFacts = field(default_factory=DataFacts)
    ramp: Stages = ()
    lora: LoRAConfig | None = None
    length: int | None = None
    ema: bool = False

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.length or self.model.block_size

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch on one rank."""
        return self.sequences_of(self.global_batch)

    @property
    def accumulation(self) -> int:
        return self.global_batch // (self.sequences * self.layout.data_parallel)

    def sequences_of(self, batch: int) -> int:
        """Sequences per micro-batch on one rank in a step of `batch` sequences; 0 if the ranks cannot share it."""
        return micro_batch(batch, self.micro_batch, self.layout.data_parallel, self.layout.pipeline)

    @property
    def micro_batches(self) -> dict[int, int]:
        """Sequences of a micro-batch (0: impossible) → the most micro-batches of them in a step. Several sizes under a ramp."""
        found: dict[int, int] = {}
        for _, batch in self.stages:
            size = self.sequences_of(batch)
            found[size] = max(found.get(size, 0), batch // (max(1, size) * self.layout.data_parallel))
        return found

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_before(self.steps)

    @property
    def stages(self) -> Stages:
        """The stages of the ramp; a constant batch has one stage."""
        return self.ramp or ((0, self.global_batch),)

    def with_checkpointing(self, mode: Any) -> RunSettings:
        """The same run with another `compute.activation_checkpointing`."""
        return replace(self, compute=replace(self.compute, activation_checkpointing=mode))

    def tokens_before(self, step: int) -> int:
        """Tokens in the first `step` steps."""
        return sequences_before(self.stages, step) * self.sequence_length

    def problems(self) -> list[str]:
        """One sentence for each size that does not divide. Batch sizes get the message that `fit` prints.

        Raises:
            UserError: a custom model cannot be built.
        """
        model, layout, pipeline = self.model, self.layout, self.layout.pipeline
        sizes = layout.sizes
        if isinstance(model, CustomConfig):
            from lit_llm.plan import custom_model  # imports torch

            architecture, found = model.architecture, custom_model.problems(self)
        else:
            architecture, found = None, _split_problems(model, layout)
        if pipeline.ranks > 1:
            found += [
                *pipeline.problems(),
                *pipeline_problems(
                    *(pipeline, sizes, model, architecture, None, self.precision, self.chunk_size),
                    reshards=not layout.kept.weights and sizes.data_parallel * sizes.context > 1,
                ),
            ]
        length = self.sequence_length
        ramp: dict[int, int | None] = {size * length: length for _, size in self.ramp}
        shared = (
            batch_problem(size, self.micro_batch, layout.data_parallel, pipeline, length=unit)
            for size, unit in (ramp or {self.global_batch: None}).items()
        )
        return [*found, *filter(None, shared)]


def _split_problems(model: GPTConfig, layout: Layout) -> list[str]:
    """What the ranks of the dimensions that split a model cannot split."""
    tp = layout.tensor_parallel
    split = {
        "n_head": model.n_head,
        "key/value heads": model.kv_heads,
        "MLP width": model.hidden_width,
        "block_size": model.block_size,
        "padded vocabulary": model.padded_vocab_size,
    }
    found = [
        f"tensor_parallel {tp} does not divide {name} {value} of the model (--trainer.strategy, --devices)."
        for name, value in split.items()
        if value % tp
    ]
    found += convolution_problems(model, {"tensor_parallel": tp})
    if layout.context > 1:
        from lit_llm.distributed.context_parallel import context_problems  # imports torch

        found += context_problems(model, layout.sizes, layout.context_attention)
    return found


def from_recipe(
    config: Mapping[str, Any],
    model: GPTConfig,
    *,
    devices: int | None,
    devices_per_node: int,
    micro_batch: int | None,
    global_batch: int,
    data: DataFacts,
    ramp: Stages = (),
    lora: LoRAConfig | None = None,
    length: int | None = None,
) -> RunSettings:
    """Settings from a parsed recipe (a nested dict).

    Args:
        devices: replaces the recipe's trainer.devices and num_nodes. None: use those, where "auto" counts as 1.
        ramp, length: as in `RunSettings`.

    Raises:
        UserError: the precision, the strategy or the number of devices cannot be planned.
    """
    trainer = config["trainer"]
    precision = canonical_precision(trainer.get("precision"))
    if devices is None:
        devices = devices_of(trainer.get("devices"), trainer.get("num_nodes") or 1)
    loss, schedule = config.get("loss") or {}, config.get("schedule") or {}
    kind, _ = class_of(schedule)
    steps = trainer["max_steps"]
    if steps == -1:
        epochs = trainer.get("max_epochs")
        if not data.train_tokens or epochs in (None, -1):
            raise UserError(
                "The number of steps depends on the size of the dataset, which is unknown: set --trainer.max_steps."
            )
        sequences = data.sequences or (data.train_tokens - 1) // (length or model.block_size)
        steps = steps_for(ramp or ((0, global_batch),), epochs * sequences)
    _, validation = class_of(config.get("validation") or {})
    _, checkpoint = class_of(config.get("checkpoint") or {})
    layout = layout_from_strategy(trainer.get("strategy") or "auto", devices, devices_per_node)
    return RunSettings(
        model=model,
        optimizer=optimizer_of(config["optimizer"]),
        steps=steps,
        global_batch=global_batch,
        micro_batch=micro_batch,
        precision=precision,
        compute=ComputeConfig(**config.get("compute") or {}),
        layout=layout,
        chunk_size=loss.get("chunk_size"),
        z_loss=bool(loss.get("z_loss")),
        schedule=Schedule(kind or "Constant"),
        validate_every=validation.get("every_n_steps"),
        save_every=checkpoint.get("every_n_steps"),
        keep_last=checkpoint.get("keep_last") or 1,
        background_saves=layout.splits_model if (saves := config.get("async_checkpoints", "auto")) == "auto" else bool(saves),
        data=data,
        ramp=ramp,
        lora=lora,
        length=length,
        ema=config.get("ema") is not None,
    )


def optimizer_of(group: Mapping[str, Any]) -> Optimizer:
    name, options = class_of(group)
    if group.get("class_path") == TORCH_MUON:
        return Optimizer(TORCH_MUON, ns_dtype="bfloat16")
    return Optimizer(
        name,
        momentum=bool(options.get("momentum")),
        fused=bool(options.get("fused")) or name == "AdamW8bit",
        ns_dtype=options.get("ns_dtype") or "auto",
        normuon=options.get("normuon_beta2") is not None,
    )


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
