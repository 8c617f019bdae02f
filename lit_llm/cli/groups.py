"""What can be set: the keys of a launch, and the groups of a recipe with their defaults.

Each group is one key: what an overlay or a flag should be able to change alone is a group of its own, because lists (such as
trainer.callbacks) are replaced as a whole, dicts are merged key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
import yaml
from jsonargparse import SUPPRESS, get_loader, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import Optimizer

import lit_llm.data
from lit_llm import callbacks
from lit_llm.cli.preflight import concrete_subclasses
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.errors import UserError
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.renamed_classes import flags_with_current_names, with_current_names
from lit_llm.training.plan_monitor import PlanMonitor

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # GPTConfig's comments are the flags' help

Command = Literal["fit", "validate", "test", "prepare"]

# Group → base class, default. A group that is null is left out of the run; samples need a prompt, so they start as null.
CALLBACKS: dict[str, tuple[type[Callback], dict[str, Any] | None]] = {
    "schedule": (callbacks.Schedule, {"class_path": "lit_llm.callbacks.Cosine"}),
    "batch_ramp": (callbacks.BatchRamp, None),
    "gradient_norm": (callbacks.GradientNorm, {"class_path": "lit_llm.callbacks.GradientNorm"}),
    "validation": (
        callbacks.ValidateEvery,
        {"class_path": "lit_llm.callbacks.ValidateEvery", "init_args": {"every_n_steps": 1000}},
    ),
    "throughput": (callbacks.Throughput, {"class_path": "lit_llm.callbacks.Throughput"}),
    "plan": (PlanMonitor, {"class_path": "lit_llm.training.plan_monitor.PlanMonitor"}),
    "time_breakdown": (callbacks.TimeBreakdown, None),
    "stragglers": (callbacks.Stragglers, {"class_path": "lit_llm.callbacks.Stragglers"}),
    "profile": (callbacks.Profile, None),
    "samples": (callbacks.TextSamples, None),
    "page": (callbacks.TensorBoardPage, {"class_path": "lit_llm.callbacks.TensorBoardPage"}),
    "progress": (callbacks.TrainingProgress, {"class_path": "lit_llm.callbacks.TrainingProgress"}),
    "spike_guard": (callbacks.SpikeGuard, {"class_path": "lit_llm.callbacks.SpikeGuard"}),
    "signals": (callbacks.StopOnSignal, {"class_path": "lit_llm.callbacks.StopOnSignal"}),
    "checkpoint": (callbacks.StepCheckpoint, {"class_path": "lit_llm.callbacks.StepCheckpoint"}),
}

TRAINER: dict[str, Any] = {
    "max_epochs": -1,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # our order of samples is global; true for other DataModules
    "enable_model_summary": False,
}
"""Where a recipe's Trainer differs from Lightning's."""


_load_yaml = get_loader("yaml")
set_loader("recipe", lambda text: with_current_names(_load_yaml(text), CALLBACKS), (yaml.YAMLError,))


class RecipeParser(LightningArgumentParser):
    """Raises instead of exiting, so that all mistakes can be gathered. Accepts old names of classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": "recipe", **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().parse_args(args and flags_with_current_names(args, CALLBACKS), *rest, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message) from ex


def add_arguments(parser: LightningArgumentParser, command: Command) -> None:
    """All of them."""
    _add_launch(parser, command)
    _add_groups(parser)


def _add_launch(parser: LightningArgumentParser, command: Command) -> None:
    parser.add_argument(
        "--run_dir", type=str | None, default=None, help="Where the run is kept. Null: runs/<name of the recipe>."
    )
    parser.add_argument(
        "--async_checkpoints",
        type=bool,
        default=False,
        help="Write checkpoints in the background, from a copy in host memory.",
    )
    parser.add_argument(
        "--sharded_checkpoints",
        type=bool,
        default=False,
        help="With MeshStrategy every rank writes its part of a checkpoint, instead of rank 0 the whole.",
    )
    parser.add_argument(
        "--init_from",
        type=str | None,
        default=None,
        help="fit starts with the weights of this run folder or checkpoint (not its optimizer and step), with its model "
        "and tokenizer where the recipe does not say; not when it resumes. `import` makes such folders of others.",
    )
    parser.add_argument("--base", type=str | None, default=None, help=SUPPRESS)  # `with_bases` has read it
    # The config.yaml of a branch names where it began: every command accepts it, as it does trainer.max_steps.
    parser.add_argument(
        "--resume",
        type=str,
        default="never",
        help="auto: continue the run folder from its last good checkpoint, or start it; PATH: continue from there, in a "
        "folder of its own if the checkpoint is another run's; never: start, and refuse a folder that holds a run."
        if command == "fit"
        else SUPPRESS,
    )
    if command == "fit":
        parser.add_argument(
            "--replace", type=bool, default=False, help="Rename an existing run folder to <name>.1 and start anew."
        )
        parser.add_argument(
            "--accept_changes",
            type=bool,
            default=False,
            help="Resume although the data, the batch or the model's settings are not those of the checkpoint.",
        )
        parser.add_argument(
            "--check_against",
            type=str | None,
            default=None,
            help="A curve (CSV, made by `curve`) to compare the run with while it trains; auto: the recipe's own, shipped "
            "in recipes/evidence. A run that leaves it says where, and ends with exit code 1.",
        )
        parser.add_argument(
            "--check_tolerance",
            type=float,
            default=0.02,
            help="Relative difference of losses from the curve of --check_against that is allowed.",
        )
        parser.add_argument(
            "--additional_steps",
            type=int | None,
            default=None,
            help="With --resume PATH: set trainer.max_steps, where the schedule ends too, to this many after that "
            "checkpoint. The run is a branch, in a folder of its own.",
        )
    elif command == "prepare":
        parser.add_argument("--out", type=str | None, default=None, help="Empty or new folder for the shards.")
        parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="Tokens in a shard at most.")
    else:
        parser.add_argument("--ckpt_path", type=str, default="last", help="last, best, or a checkpoint file.")


def _add_groups(parser: LightningArgumentParser) -> None:
    parser.add_class_arguments(GPTConfig, "model")
    parser.add_subclass_arguments(
        (torch.nn.Module,),
        "architecture",
        instantiate=False,
        fail_untyped=False,
        skip={"vocab_size"},
        required=False,
        help="A model of your own instead, by the path of its class (docs/your-project.md).",
    )
    parser.add_class_arguments(LossConfig, "loss")
    parser.add_class_arguments(ComputeConfig, "compute")
    parser.add_subclass_arguments(
        (Optimizer,), "optimizer", instantiate=False, fail_untyped=False, skip={"params"}, required=True
    )
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=True)
    for group, (base, _) in CALLBACKS.items():
        parser.add_lightning_class_args(base, group, subclass_mode=True, required=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.set_defaults({"trainer." + key: value for key, value in TRAINER.items()})
    parser.set_defaults(
        {
            "optimizer": {"class_path": "lit_llm.optim.MuonAdamW"},
            "data": {"class_path": "lit_llm.data.PythonStdlib"},
            **{group: default for group, (_, default) in CALLBACKS.items()},
        }
    )


def known_classes(key: str) -> list[str]:
    """Names of the classes that a group can have; none for keys that take no class."""
    bases: dict[str, type] = {group: base for group, (base, _) in CALLBACKS.items()}
    bases |= {"data": LightningDataModule, "optimizer": Optimizer, "data.tokenizer": lit_llm.data.Tokenizer}
    return sorted(c.__name__ for c in concrete_subclasses(bases[key])) if key in bases else []
