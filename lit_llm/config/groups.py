"""The keys of a recipe: the options of a launch, and the groups with their base classes and defaults. No torch.

A group is one top-level key of a recipe. Overlays and flags replace lists as a whole and merge dicts key by key. So a callback
that an overlay should be able to change alone is a group of its own instead of an entry of `trainer.callbacks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lit_llm.core.number_domain import STEPS, Domain, above, at_least, whole
from lit_llm.runs.curve import TOLERANCE

Command = Literal["fit", "validate", "test", "prepare"]


@dataclass(frozen=True)
class ClassGroup:
    """Description of a group of the recipe whose value is a class with its arguments.

    Attributes:
        base: class path of the base class.
        default: the class path used when a recipe does not name a class. None: the group is off.
        arguments: {argument: default in a recipe} where this differs from the default class's own. None: nowhere.
        package: the module in which short class names are looked up.
    """

    base: str
    default: str | None
    arguments: dict[str, Any] | None
    package: str

    @property
    def value(self) -> dict[str, Any] | None:
        """The group's default value, as a recipe would write it; None if the group is off by default."""
        if self.default is None:
            return None
        return {"class_path": self.default, **({"init_args": self.arguments} if self.arguments else {})}


def _callback(name: str, default: str | None = None, package: str = "lit_llm.callbacks", **arguments: Any) -> ClassGroup:
    return ClassGroup(f"{package}.{name}", default and f"{package}.{default}", arguments or None, package)


CALLBACKS: dict[str, ClassGroup] = {
    "schedule": _callback("Schedule", "Cosine"),
    "batch_ramp": _callback("BatchRamp"),
    "health": _callback("HealthSignals", "HealthSignals"),  # sees gradients before they are clipped
    "histograms": _callback("Histograms"),  # also before clipping
    "gradient_norm": _callback("GradientNorm", "GradientNorm"),
    "gradient_noise": _callback("GradientNoise"),
    "ema": _callback("EMA"),
    "validation": _callback("ValidateEvery", "ValidateEvery", every_n_steps=1000),
    "throughput": _callback("Throughput", "Throughput"),
    "plan": _callback("PlanMonitor", "PlanMonitor", "lit_llm.plan.plan_monitor"),
    "time_breakdown": _callback("TimeBreakdown"),
    "stragglers": _callback("Stragglers", "Stragglers"),
    "doctor": _callback("Doctor", "Doctor", "lit_llm.reporting.doctor.watch"),
    "profile": _callback("Profile"),
    "samples": _callback("TextSamples"),
    "tasks": _callback("TaskScores"),
    "page": _callback("TensorBoardPage", "TensorBoardPage"),
    "progress": _callback("TrainingProgress", "TrainingProgress"),
    "spike_guard": _callback("SpikeGuard", "SpikeGuard"),
    "expert_balance": _callback("ExpertBalance"),  # moves nothing in a step that is skipped
    "signals": _callback("StopOnSignal", "StopOnSignal"),
    "checkpoint": _callback("StepCheckpoint", "StepCheckpoint"),
}
"""Groups that become callbacks, in the order in which they are called. A group that is null is left out of the run."""

PLAIN: dict[str, str] = {
    "model": "lit_llm.models.gpt.GPTConfig",
    "lora": "lit_llm.models.lora.LoRAConfig",
    "loss": "lit_llm.models.loss.LossConfig",
    "compute": "lit_llm.distributed.compute_config.ComputeConfig",
    "trainer": "lightning.pytorch.trainer.trainer.Trainer",
}
"""Groups whose class is fixed: group → class path."""

OFF = ("lora",)
"""Groups of PLAIN that are null, and so off, unless a recipe sets one of their keys."""

CLASSES: dict[str, ClassGroup] = {
    "objective": ClassGroup(
        "lit_llm.training.objective.Objective", "lit_llm.training.objective.CrossEntropy", None, "lit_llm.training"
    ),
    "optimizer": ClassGroup("torch.optim.Optimizer", "lit_llm.optim.MuonAdamW", None, "lit_llm.optim"),
    "data": ClassGroup("lightning.pytorch.LightningDataModule", "lit_llm.data.PythonStdlib", None, "lit_llm.data"),
    **CALLBACKS,
}
"""Every group that names a class of a known kind."""


WARMUPS: dict[str, Domain] = {"warmup_fraction": at_least(0, 1), "warmup_tokens": at_least(0)}
"""Keys of `schedule` that give a warmup other than in steps: as a share of the schedule's steps, or in tokens."""


def default_class(key: str) -> str | None:
    """The path of a group's default class or, without one, of its base class; None for keys that are no group of `CLASSES`."""
    return CLASSES[key].default or CLASSES[key].base if key in CLASSES else None


_KEYS = {path.rpartition(".")[2]: key for key, path in [*PLAIN.items(), *((key, group.base) for key, group in CLASSES.items())]}
"""{name of a group's class, or of its base class: the group}."""


def flag_of(owner: type, argument: str | None) -> str | None:
    """The flag of the group that can name the class `owner`, or of its argument `argument` if given; None without a group."""
    key = next((_KEYS[base.__name__] for base in owner.__mro__ if base.__name__ in _KEYS), None)
    return key and f"--{key}" + (f".{argument}" if argument else "")


ARCHITECTURE = "architecture"
"""The group that names any torch.nn.Module to train instead of lit_llm's GPT."""
OF_ARCHITECTURES = ("block_size", "vocab_size", "eos_id")
"""The settings of `model` that apply to the module that `architecture` names."""

GROUPS: tuple[str, ...] = (
    "model",
    ARCHITECTURE,
    "loss",
    "compute",
    "lora",
    "objective",
    "optimizer",
    "data",
    *CALLBACKS,
    "trainer",
)
"""All groups, in the order of config.yaml."""

TRAINER: dict[str, Any] = {
    "max_epochs": -1,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # lit_llm orders samples over all ranks; other DataModules get true
    "enable_model_summary": False,
}
"""Trainer settings whose defaults differ from Lightning's."""


@dataclass(frozen=True)
class Option:
    """Record of a key that belongs to the launch, not to a group. `commands`: the commands that use it and show it in help."""

    name: str
    type: Any
    default: Any
    help: str
    commands: tuple[Command, ...] = ("fit", "validate", "test", "prepare")
    range: Domain | None = None


_EVALUATE: tuple[Command, ...] = ("validate", "test")

OPTIONS: tuple[Option, ...] = (
    Option(
        "seed_everything", bool | int, 1337, "Seed of random numbers. true: PL_GLOBAL_SEED, or 0.", range=whole(0, 2**32 - 1)
    ),
    Option("run_dir", str | None, None, "Folder of the run. null: runs/<name of the recipe>."),
    Option(
        "async_checkpoints",
        bool | Literal["auto"],
        "auto",
        "Write checkpoints in the background, from a copy in host memory. auto: where checkpoints are sharded and the copies "
        "take at most half of the free memory.",
    ),
    Option(
        "sharded_checkpoints",
        bool | Literal["auto"],
        "auto",
        "With MeshStrategy, each rank writes its own part of a checkpoint. false: rank 0 writes everything. auto: true where "
        "MeshStrategy splits the model over ranks.",
    ),
    Option(
        "init_from",
        str | None,
        None,
        "Start with the weights of this run folder or checkpoint, at step 0 with a new optimizer. Its model and tokenizer are "
        "used unless the recipe sets them. `import` creates such a folder from a Hugging Face model. Ignored when resuming.",
    ),
    Option(
        "use_ema",
        bool,
        False,
        "Take the average of the weights that a run kept (--ema EMA) instead of its weights: of --init_from, or of the "
        "checkpoint that is evaluated.",
        ("fit", "validate", "test"),
    ),
    Option(
        "resume",
        str,
        "never",
        "auto: continue the run folder from its last good checkpoint, or start it. PATH: continue from this checkpoint, in "
        "another folder if it belongs to another run. never: start, and refuse a folder that holds a run.",
        ("fit",),
    ),
    Option(
        "replace",
        bool,
        False,
        "Rename an existing folder of the run, or of the shards, to <name>.1.",
        ("fit", "prepare"),
    ),
    Option(
        "accept_changes",
        bool,
        False,
        "Resume although data, batch or model settings differ from those of the checkpoint.",
        ("fit",),
    ),
    Option(
        "check_against",
        str | None,
        None,
        "Compare the run with a curve (a CSV of `report --csv`) while it trains. auto: the curve shipped for the recipe. A run "
        "that leaves the curve reports where and exits with code 1.",
        ("fit",),
    ),
    Option(
        "check_tolerance", float, TOLERANCE, "Allowed relative difference of losses from that curve.", ("fit",), above(0, 1000)
    ),
    Option(
        "additional_steps",
        int | None,
        None,
        "With --resume PATH: end this many steps after that checkpoint. The run is a branch, in another folder.",
        ("fit",),
        whole(1, STEPS, null=True),
    ),
    Option(
        "hang_timeout",
        float | None,
        1200.0,
        "Seconds without progress on any rank after which all ranks end, and name the one that is behind. null: wait for ever.",
        ("fit",),
        above(0, 10**7, null=True),
    ),
    Option(
        "log_dir",
        str | None,
        None,
        "Folder for a log of each rank: its output, with that of libraries. The terminal still shows rank 0.",
        ("fit",),
    ),
    Option("out", str | None, None, "Empty or new folder for the shards.", ("prepare",)),
    Option(
        "workers",
        int,
        1,
        "Processes that read and tokenise. The result is the same for any number.",
        ("prepare",),
        whole(1, 4096),
    ),
    Option("shard_tokens", int, 100_000_000, "Maximum number of tokens in a shard.", ("prepare",), whole(1, 2**31 - 1)),
    Option("ckpt_path", str, "last", "last, best, or a checkpoint file.", _EVALUATE),
)


LAUNCH_ONLY = ("replace", "accept_changes", "additional_steps", "check_against", "check_tolerance", "hang_timeout", "log_dir")
"""Options that say nothing about the run: config.yaml does not have them."""


def options_of(command: Command) -> list[Option]:
    """The options that a command accepts: its own, and those of `fit` that a run's config.yaml can have, which it ignores."""
    kept = [option for option in OPTIONS if "fit" in option.commands and option.name not in LAUNCH_ONLY]
    return [option for option in OPTIONS if command in option.commands or option in kept]
