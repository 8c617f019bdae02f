"""The settings of a run as plain numbers, taken from a parsed recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_llm.core.batch_sizes import batch_problem, micro_batch
from lit_llm.core.errors import UserError
from lit_llm.core.mesh_sizes import MeshSizes, mesh_sizes
from lit_llm.distributed.keep_rule import keep
from lit_llm.distributed.layout_problems import convolution_problems
from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout
from lit_llm.models.attention_kernel import AttentionKernel
from lit_llm.models.config import GPTConfig
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.memory import BYTES, Layout
from lit_llm.plan.micro_batch import Step
from lit_llm.plan.mixture import Phases
from lit_llm.plan.optimizer import TORCH_MUON, Optimizer
from lit_llm.plan.ramp import Stages, sequences_before, steps_for

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig

STRATEGIES = (
    "single",
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "fsdp2",
    "hsdp",
    "tp",
    "fsdp2-tp",
    "cp",
    "fsdp2-cp",
    "pp",
    "fsdp2-pp",
    "3d",
    "4d",
)
CHECKPOINTING = ("none", "cheap", "attention", "full")


@dataclass(frozen=True)
class DataFacts:
    """Size of the dataset in tokens. `origin` says how it is known: "counted …", "estimated …", or "unknown" (sizes None).

    `phases`: what a mixture draws from its sources. `sequences`: of one epoch of packed documents; None: unknown, or not
    packed. `packing`: what packing does to the documents.
    """

    train_tokens: int | None = None
    val_tokens: int | None = None
    origin: str = "unknown"
    bytes_per_token: int = 2
    phases: Phases = ()
    sequences: int | None = None
    packing: str = ""


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
    matmul_precision: str = "highest"
    float8: bool = False
    compile: bool = False
    layout: Layout = field(default_factory=Layout)
    chunk_size: int | None = None
    z_loss: bool = False
    checkpointing: str = "none"
    schedule: Schedule = field(default_factory=Schedule)
    validate_every: int | None = None
    save_every: int | None = None
    keep_last: int = 1
    background_saves: bool = False
    data: DataFacts = field(default_factory=DataFacts)
    ramp: Stages = ()
    lora: LoRAConfig | None = None
    length: int | None = None
    attention: AttentionKernel = "auto"
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

    def step(self, *, cuda: bool) -> Step:
        """A micro-batch of one rank whose gradients are not sharded."""
        weight_bytes, compute_bytes = BYTES[self.precision]
        return Step(
            self.model,
            self.sequences,
            weight_bytes,
            compute_bytes,
            self.chunk_size,
            z_loss=self.z_loss,
            checkpointing=self.checkpointing,
            cuda=cuda,
            tensor_parallel=self.layout.tensor_parallel,
            lora=self.lora,
            length=self.length,
            context=self.layout.context,
            gathers_keys=self.layout.context_attention == "gather",
        )

    def tokens_before(self, step: int) -> int:
        """Tokens in the first `step` steps."""
        return sequences_before(self.stages, step) * self.sequence_length

    def problems(self) -> list[str]:
        """One sentence for each size that does not divide. Batch sizes get the message that `fit` prints.

        Raises:
            UserError: a custom model cannot be built.
        """
        found = []
        model, tp, dp = self.model, self.layout.tensor_parallel, self.layout.data_parallel
        split = {
            "n_head": model.n_head,
            "key/value heads": model.kv_heads,
            "MLP width": model.hidden_width,
            "block_size": model.block_size,
            "padded vocabulary": model.padded_vocab_size,
        }
        if isinstance(model, CustomConfig):
            split = {}
        for name, value in split.items():
            if value % tp:
                found.append(
                    f"tensor_parallel {tp} does not divide {name} {value} of the model (--trainer.strategy, --devices)."
                )
        pipeline = self.layout.pipeline
        layout = self.layout
        sizes = MeshSizes(pipeline.ranks, layout.replicate, layout.shard, layout.context, layout.tensor_parallel)
        architecture = None
        if isinstance(model, CustomConfig):
            from lit_llm.plan import custom  # imports torch

            architecture = model.architecture
            found += custom.problems(self)
        else:
            found += convolution_problems(model, {"tensor_parallel": tp})
            if sizes.context > 1:
                from lit_llm.distributed.context_parallel import context_problems  # imports torch

                found += context_problems(model, sizes, layout.context_attention)
        if pipeline.ranks > 1:
            from lit_llm.distributed.layout_problems import pipeline_problems

            found += [
                *pipeline.problems(),
                *pipeline_problems(
                    *(pipeline, sizes, model, architecture, None, self.precision, self.chunk_size),
                    reshards=layout.reshard and sizes.data_parallel * sizes.context > 1,
                ),
            ]
        length = self.sequence_length
        ramp: dict[int, int | None] = {size * length: length for _, size in self.ramp}
        shared = (
            batch_problem(size, self.micro_batch, dp, pipeline, length=unit)
            for size, unit in (ramp or {self.global_batch: None}).items()
        )
        return [*found, *filter(None, shared)]


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
    trainer, compute = config["trainer"], config.get("compute") or {}
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
        matmul_precision=compute.get("matmul_precision") or "highest",
        float8=bool(compute.get("float8")),
        compile=bool(compute.get("compile")),
        layout=layout,
        chunk_size=loss.get("chunk_size"),
        z_loss=bool(loss.get("z_loss")),
        checkpointing=str(compute.get("activation_checkpointing") or "none"),
        schedule=Schedule(kind or "Constant"),
        validate_every=validation.get("every_n_steps"),
        save_every=checkpoint.get("every_n_steps"),
        keep_last=checkpoint.get("keep_last") or 1,
        background_saves=layout.splits_model if (saves := config.get("async_checkpoints", "auto")) == "auto" else bool(saves),
        data=data,
        ramp=ramp,
        lora=lora,
        length=length,
        attention=compute.get("attention") or "auto",
        ema=config.get("ema") is not None,
    )


def class_of(group: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(class name without its module, arguments) of a group with class_path and init_args."""
    return str(group.get("class_path", "")).rpartition(".")[2], group.get("init_args") or {}


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


def devices_of(devices: Any, nodes: int) -> int:
    """The number of devices in trainer.devices. A list counts its entries; "auto", -1 and None count as one device."""
    if isinstance(devices, list):
        return len(devices) * nodes
    try:
        count = int(devices)
    except (TypeError, ValueError):
        count = len(str(devices).split(",")) if "," in str(devices) else 1
    return max(1, count) * nodes


def layout_from_strategy(strategy: Any, devices: int, devices_per_node: int) -> Layout:
    """The layout of a Trainer strategy: a name, a name in STRATEGIES, or class_path and init_args.

    Raises:
        UserError: the strategy is unknown, or its mesh does not fit the number of devices.
    """
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices} (--devices).")
    options: Mapping[str, Any] = {}
    name = strategy
    if isinstance(strategy, Mapping):
        name, options = class_of(strategy)
    name = str(name)
    aliases = {"auto": "ddp", "DDPStrategy": "ddp", "FSDPStrategy": "fsdp", "SingleDeviceStrategy": "single"}
    name = aliases.get(name, "ddp" if name.startswith("ddp") else name)
    if name == "MeshStrategy":
        return _mesh(options, devices)
    if name not in STRATEGIES:
        raise UserError(f"Cannot plan for strategy {name!r}: use {', '.join(STRATEGIES)} or MeshStrategy (--trainer.strategy).")
    if name == "single" and devices > 1:
        raise UserError(f"Strategy single uses one device, not {devices}: set --devices 1 or another --trainer.strategy.")
    if devices == 1:
        return Layout(name if name != "ddp" else "single", cpu_offload=bool(options.get("cpu_offload")))
    if name == "ddp":
        return Layout("ddp", replicate=devices, bucket_copies=not options.get("gradient_as_bucket_view"))
    if name in ("zero1", "zero2"):
        return Layout(name, shard=devices, shards="optimizer" if name == "zero1" else "gradients")
    if name in ("fsdp", "fsdp2"):
        options = {**options, "reshard_after_forward": True} if name == "fsdp" else options  # as `from_fsdp1` translates it
        return replace(_mesh(options, devices), strategy=name)
    inside = min(devices, devices_per_node)
    mesh = {
        "hsdp": {"replicate": devices // inside, "shard": inside},
        "tp": {"tensor_parallel": devices, "shard": 1},
        "fsdp2-tp": {"tensor_parallel": min(2, devices)},
        "cp": {"context": devices, "shard": 1},
        "fsdp2-cp": {"context": 2},
        "pp": {"pipeline": devices, "shard": 1},
        "fsdp2-pp": {"pipeline": 2},
        "3d": {"pipeline": 2, "tensor_parallel": 2},
        "4d": {"pipeline": 2, "context": 2, "tensor_parallel": 2},
    }[name]
    return replace(_mesh(mesh, devices), strategy=name)


def _mesh(options: Mapping[str, Any], devices: int) -> Layout:
    """The layout of a `MeshStrategy` with these arguments."""
    given = {name: options.get(name) or 1 for name in MeshSizes._fields} | {"shard": options.get("shard", "auto")}
    sizes = mesh_sizes(devices, **given)
    asked = {
        "weights": options.get("reshard_after_forward", "auto"),
        "gradients": options.get("reduce_each_micro_batch", "auto"),
    }
    schedule: Any = options.get("schedule") or "1f1b"
    in_pipeline = sizes.pipeline > 1
    kept = keep(asked["weights"], asked["gradients"], pipeline=in_pipeline, weight_bytes=1, gradient_bytes=1, memory=0)
    settled = (("gradients", "weights") if KINDS[schedule].splits_backward else ("gradients",)) if in_pipeline else ()
    return Layout(
        "mesh",
        sizes.replicate,
        sizes.shard,
        sizes.tensor_parallel,
        shards="parameters" if sizes.shard * sizes.context > 1 else "nothing",
        reshard=not kept.weights,
        reduce_once=kept.gradients,
        auto=tuple(name for name, value in asked.items() if value == "auto" and name not in settled),  # type: ignore[misc]
        prefetch=options.get("prefetch", 1),
        cpu_offload=bool(options.get("cpu_offload")),
        context=sizes.context,
        context_attention=options.get("context_attention") or "gather",
        pipeline=PipelineLayout(
            sizes.pipeline,
            schedule,
            *(options.get(name) for name in ("stages_per_rank", "layers_first", "layers_last")),
        ),
    )
