"""A run between its arguments and its objects: every setting, and what the launch decided about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lit_llm.config.arguments import Arguments, Assignment, as_list, leaves
from lit_llm.config.devices import OtherMachine
from lit_llm.config.groups import ARCHITECTURE, GROUPS, OF_ARCHITECTURES, Command
from lit_llm.config.parse_errors import is_mistake, reason
from lit_llm.config.parser import parser_of, parser_of_options
from lit_llm.config.tree import Tree
from lit_llm.core.errors import UserError, report, with_flag
from lit_llm.core.yaml_reading import read_yaml
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import expanded


@dataclass(frozen=True)
class RunSpec:
    """Record of a run's settings: `resolve.read_spec` reads them from arguments, `resolve.decide` decides what is open.

    Attributes:
        tree: the settings that recipe files, flags and the weights of `init_from` give.
        config: every setting, with the defaults of the chosen classes. `decide` sets run_dir, resume and seed_everything, and
            the Trainer's precision, max_steps, max_epochs and use_distributed_sampler.
        given: dotted keys that a recipe file or a flag sets, without `init_args`.
        problems: one sentence per mistake. `config` then has only the settings without mistakes.
        notes: sentences to print if there are no problems, such as which arguments were dropped with their class.
        warmup: the share or the tokens from which `schedule.warmup_steps` follows. None: it is given in steps, or not given.
        named_weights: the weights that `init_from` names.
        unusable_weights: why the weights that `init_from` names cannot be used. A resumed run ignores these reasons.
        model, lora, loss, compute: the settings of these groups. None: not decided yet, off, or their values are problems.
        run_dir: the run folder; the empty path before `decide`.
        start: the checkpoint that the run continues from, with the changed settings that it announces.
        scratch: whether the results of the run are discarded. Such a run never resumes, and its checkpoints are not sharded.
        machine: the devices that the run is planned for; None: this machine.
        refused: groups with a number outside its range. Objects of these groups are not built.
    """

    command: Command
    arguments: Arguments
    tree: Tree
    config: Namespace
    given: frozenset[str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    warmup: Assignment | None = None
    named_weights: InitialWeights | None = None
    unusable_weights: tuple[str, ...] = ()
    model: GPTConfig | None = None
    lora: LoRAConfig | None = None
    loss: LossConfig | None = None
    compute: ComputeConfig | None = None
    run_dir: Path = Path()
    start: RunStart = field(default_factory=RunStart)
    scratch: bool = False
    machine: OtherMachine | None = None
    refused: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool:
        """Whether the command is `fit`."""
        return self.command == "fit"

    @property
    def describes_model(self) -> bool:
        """Whether the recipe itself says what the model is, so that it can be planned without the weights of `init_from`."""
        return {"model.n_layer", "model.n_embd"} <= self.given

    @property
    def log_dir(self) -> Path | None:
        """The folder into which each rank writes a log; None: no logs.

        Raises:
            UserError: The setting log_dir has an environment variable that is not set.
        """
        named = self.config.log_dir
        return None if named is None else expanded(named, key="log_dir", flag="--log_dir DIR")

    @property
    def initial(self) -> InitialWeights | None:
        """The weights that `init_from` names, with which the run starts; None if the run resumes or names no weights."""
        return None if self.start.checkpoint is not None else self.named_weights

    @property
    def lacks_weights(self) -> bool:
        """Whether `fit` would start from random weights; False for a plan of a recipe that itself describes the model."""
        starts = self.fits and self.named_weights is None and self.start.checkpoint is None
        return starts and not (self.machine is not None and self.describes_model)

    @property
    def uses_average(self) -> bool:
        """Whether to use averaged weights: use_ema is true and, if the command is not `fit`, given as a flag, not in a file."""
        return bool(self.config.use_ema) and (self.fits or self.arguments.asks_for("use_ema") is not None)

    def with_settings(self, settings: Mapping[str, Any]) -> RunSpec:
        """Return a copy with the values of `settings` in `config`: {key, such as `optimizer.init_args.lr`: value}."""
        config = self.config.clone()
        for key, value in settings.items():
            config[key] = value
        return replace(self, config=config)

    def build(self, group: str, *, without: Collection[str] = ()) -> Any:
        """Build and return the object of a group, with the objects that are its arguments; None if the group is off.

        Args:
            without: arguments of the group's class that are not passed to it.

        Raises:
            UserError: A constructor refuses its arguments.
        """
        config = self.config.clone()[group]
        for name in without:
            config.pop(name, None)
        try:
            return parser_of(group).instantiate(Namespace({group: config})).get(group)
        except Exception as error:  # constructors of torch, Lightning and users raise many types
            if not is_mistake(error):
                raise
            why = reason(str(error))
            raise UserError(why if "--" in why else with_flag(why, f"--{group}").rstrip(".")) from error

    def as_yaml(self, *, without: Collection[str] = ()) -> str:
        """Return the settings as YAML text, a recipe that runs without other files and flags.

        All settings are written, but with a user's architecture only few settings of `model`, and for a class of another
        package in `trainer` only given arguments: its defaults differ between versions, and some cannot be written.

        Args:
            without: top-level keys that are left out.
        """
        config = self.config.clone()
        for key in without:
            config.pop(key, None)
        if config.get(ARCHITECTURE) is not None:
            config.model = Namespace({name: config.model[name] for name in OF_ARCHITECTURES})
        for key in _TRAINER_CLASSES:
            for entry, given in zip(as_list(config.trainer.get(key)), as_list(self.tree.get(f"trainer.{key}")), strict=False):
                if isinstance(entry, Namespace) and not str(entry.get("class_path")).startswith("lit_llm."):
                    arguments = entry.get("init_args") or Namespace()
                    names = (given.get("init_args") or {}) if isinstance(given, dict) else {}
                    entry.init_args = Namespace({name: arguments[name] for name in vars(arguments) if name in names})
        options = Namespace({key: value for key, value in vars(config).items() if key not in GROUPS})
        parts = [(parser_of_options(self.command), options)]
        parts += [(parser_of(group), Namespace({group: config[group]})) for group in GROUPS if group in config]
        return "".join(parser.dump(values, skip_unset=False, skip_validation=True) for parser, values in parts)

    def settings(self) -> dict[str, Any]:
        """Return {dotted key without `init_args`: plain value} of the settings that `as_yaml` writes."""
        return dict(leaves(read_yaml(self.as_yaml())))

    def raise_problems(self) -> None:
        """Print the notes, unless there are problems.

        Raises:
            UserError: There are problems.
        """
        if self.problems:
            raise UserError("\n".join(self.problems))
        report("\n".join(self.notes), kind="note")


_TRAINER_CLASSES = ("logger", "callbacks", "plugins", "profiler", "strategy")
"""Settings of the Trainer that take classes of any package."""
