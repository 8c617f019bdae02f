"""Checks of a run's objects. Each function returns a list of sentences, one for each problem, and changes nothing."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer

from lit_llm.checkpoint.adapters import average_problem, base_checkpoint, base_damage, no_base
from lit_llm.checkpoint.disk_format import damage_before_load, read_values
from lit_llm.config.objects import RunObjects
from lit_llm.config.preflight import callback_problems, device_problems, optimizer_device_problem
from lit_llm.core.batch_sizes import small_note
from lit_llm.core.errors import UserError
from lit_llm.core.ranks import is_rank_zero
from lit_llm.data import TokenDataModule
from lit_llm.distributed.layout import layout_problems
from lit_llm.models.lora import rank_problem, target_problems
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.saved_run import SavedRun
from lit_llm.training.objective import Objective
from lit_llm.training.saved_state import class_name


def model_problems(objects: RunObjects) -> list[str]:
    """Return the problems of the model, the loss, the compute settings, a custom model, the objective, and LoRA adapters."""
    spec, data, problems = objects.spec, objects.datamodule, list[str]()
    model, loss = spec.model, spec.loss
    if model is not None:
        problems += [problem for problem in model.problems() if problem not in spec.problems]  # which has those of ranges
        if not model.problems() and (getattr(data, "block_size", None) or 0) > model.block_size:
            problems.append(
                f"data.block_size={data.block_size} is longer than model.block_size={model.block_size} "
                "(lower --data.block_size, or, with rotary positions, raise --model.block_size)"
            )
        if "expert_balance" in objects.parts and model.moe is None and objects.architecture is None:
            problems.append(
                "expert_balance moves the biases of experts, but the model has none "
                "(--model.moe.experts 8, or --expert_balance null)"
            )
        if loss is not None and loss.ahead_weight != type(loss).ahead_weight and not model.predict_ahead:
            problems.append(
                f"loss.ahead_weight is {loss.ahead_weight:g}, but no further token is predicted (--model.predict_ahead 1)"
            )
    problems += [] if loss is None else loss.problems()
    problems += [] if spec.compute is None else spec.compute.problems()
    if objects.architecture is not None and model is not None and loss is not None and spec.compute is not None:
        problems += objects.architecture.problems(model, loss.chunk_size, spec.compute)
    return problems + _objective_problems(objects) + _lora_problems(objects)


def _objective_problems(objects: RunObjects) -> list[str]:
    objective: Objective | None = objects.parts.get("objective")
    if objective is None:
        return []
    name, problems = type(objective).__name__, objective.problems(objects.parts)
    if objective.needs_gpt and objects.architecture is not None:
        problems.append(
            f"objective {name} trains lit_llm's GPT only, not {objects.architecture.class_path} (--objective CrossEntropy)"
        )
    if objective.uses_reference and objects.spec.lacks_weights:
        problems.append(f"objective {name} compares with the model that training starts from: name its run (--init_from RUN)")
    return problems


def _lora_problems(objects: RunObjects) -> list[str]:
    spec, model, lora = objects.spec, objects.spec.model, objects.spec.lora
    if lora is None:
        return []
    if objects.architecture is not None:
        return [
            f"lora adapts the linear layers of lit_llm's GPT only, not those of {objects.architecture.class_path} (--lora null)"
        ]
    problems = []
    if model is not None and model.moe is not None and spec.fits:
        balance, lacks = objects.parts.get("expert_balance"), "lora saves adapters only, and not the routers' loads and biases"
        problems += [f"{lacks}: leave out the loss that needs them (--model.moe.balance 0)"] * bool(model.moe.balance)
        moves = balance is not None and balance.rate
        problems += [f"{lacks}: leave out what moves them (--expert_balance null)"] * bool(moves)
    if spec.lacks_weights:
        problems += ["lora trains adapters beside frozen weights: name the run or the import that has them (--init_from RUN)"]
    if spec.compute is not None and spec.compute.float8:
        problems.append("lora does not work with compute.float8, which replaces the layers (--compute.float8 false)")
    if model is not None and not model.problems():
        problems += target_problems(lora, model)
        # An imported adapter of the package peft may have any rank, and is evaluated as it is.
        problems += filter(None, [rank_problem(lora, model) if spec.fits else None])
    return problems


def training_problems(objects: RunObjects) -> list[str]:
    """Return the problems of the callbacks of a `fit` run, and a sentence if the run has no end; [] for other commands."""
    if not objects.spec.fits or objects.trainer is None:
        return []
    problems = callback_problems(objects.trainer, objects.datamodule)
    endless = objects.trainer.max_steps == -1 and objects.trainer.max_epochs in (None, -1)
    # A DataModule with needs_max_steps itself refuses a run without max_steps.
    if endless and not getattr(objects.datamodule, "needs_max_steps", False):
        problems += ["the run has no end: choose a recipe (--config NAME), or set --trainer.max_steps or --trainer.max_epochs"]
    for unit in ("steps", "epochs"):
        least, most = (getattr(objects.trainer, f"{end}_{unit}") for end in ("min", "max"))
        if least is not None and most not in (None, -1) and least > most:
            problems.append(f"trainer.min_{unit} is {least}, above trainer.max_{unit} {most} (--trainer.max_{unit} {least})")
    checkpoint = objects.parts.get("checkpoint")
    if checkpoint is not None and checkpoint.dirpath is not None:
        where = f"checkpoint.dirpath is {checkpoint.dirpath}, but a run is resumed from its own folder"
        problems.append(f"{where}: choose that by --run_dir (--checkpoint.dirpath null)")
    return problems


def data_problems(objects: RunObjects) -> list[str]:
    """Return the problems of the layout over devices and of the data. Those about missing files have the class MissingFiles."""
    data, layout, problems = objects.datamodule, objects.layout, list[str]()
    if objects.trainer is not None:
        problems += _device_problems(objects, objects.trainer)
    if layout is None or not hasattr(data, "problems"):
        return problems
    return [*problems, *data.problems(layout.data_parallel)]


def _device_problems(objects: RunObjects, trainer: Trainer) -> list[str]:
    """Return why the layout cannot train the model, and, if the run is for this machine, what its devices do not support."""
    spec, problems = objects.spec, list[str]()
    if objects.layout is not None:
        laid_out = spec.model, objects.architecture, spec.compute, str(spec.config.trainer.precision), spec.loss
        problems += layout_problems(objects.strategy, objects.layout, *laid_out)
    if spec.machine is not None:
        return problems
    problems += device_problems(trainer, spec.compute, spec.model if objects.architecture is None else None)
    if spec.fits:
        problems += filter(None, [optimizer_device_problem(trainer, spec.config.optimizer)])
    return problems


def batch_notes(objects: RunObjects) -> list[str]:
    """Return notes if micro-batches of a `fit` run are far smaller than possible. Call this only for a run without problems."""
    data, layout = objects.datamodule, objects.layout
    if not objects.spec.fits or layout is None or not isinstance(data, TokenDataModule):
        return []
    ramp, length = data.ramp, data.block_size
    sizes = {data.global_batch_size} if ramp is None or not length else {size for _, size in ramp.sequences(length)}
    return [
        note for size in sorted(sizes) for note in small_note(size, data.micro_batch_size, layout.data_parallel, data.pipeline)
    ]


def checkpoint_problems(objects: RunObjects) -> list[str]:
    """Return why the recipe does not match the checkpoint that `fit` continues, or that `validate` or `test` evaluates."""
    optimizer_class = None if objects.optimizer is None else class_name(objects.optimizer)
    spec = objects.spec
    accepted = spec.fits and spec.config.accept_changes
    return spec.start.changes(
        spec.model, objects.architecture, spec.lora, optimizer_class, objects.datamodule, accepted=accepted
    )


def base_of_adapters(objects: RunObjects) -> tuple[Path | None, list[str]]:
    """Return (checkpoint of the frozen base weights of a LoRA run that resumes or is evaluated, why it cannot be used).

    The setting init_from names the base weights. If its folder is gone, the LoRA checkpoint has their path. Ranks other than 0
    get (None, []).
    """
    saved, path = objects.spec.start.saved, objects.spec.config.init_from
    if saved is None or objects.spec.lora is None or not is_rank_zero():
        return None, []
    named = objects.spec.named_weights
    if named is None and path is not None and Path(path).exists():
        named = InitialWeights.find(Path(path))
    try:
        base = base_checkpoint(saved.values, saved.path, None if named is None else named.checkpoint)
    except UserError as error:
        return None, [str(error)]
    values = read_values(base) if named is None else named.saved.values
    damage = damage_before_load(base, ranks=objects.ranks) or base_damage(values, base)
    return base, [damage] if damage else []


def initial_problems(objects: RunObjects) -> list[str]:
    """Return why the weights that init_from names do not match the recipe's model, or are damaged; [] without init_from."""
    initial, model = objects.spec.initial, objects.spec.model
    if initial is None:
        return []
    of_teacher = objects.spec.command == "prepare"  # a teacher may be another model
    problems = [] if model is None or of_teacher else initial.model_problems(model, objects.architecture)
    damage = initial.damage(ranks=objects.ranks)
    return [*problems, damage] if damage else [*problems, *_average_problems(objects, initial.saved)]


def evaluation_problems(objects: RunObjects) -> list[str]:
    """Return why the evaluated checkpoint lacks weights that flags ask for: base weights of adapters, or an average."""
    saved, config = objects.spec.start.saved, objects.spec.config
    if saved is None or objects.spec.fits or not is_rank_zero():
        return []
    # In a recipe, init_from names the run's initial weights. As a flag of an evaluation, it names base weights of adapters.
    is_named = objects.spec.arguments.asks_for("init_from") is not None and config.init_from is not None
    unused = [no_base(saved.path)] if is_named and objects.spec.lora is None else []
    return unused or _average_problems(objects, saved)


def _average_problems(objects: RunObjects, saved: SavedRun) -> list[str]:
    """Return why the average of the weights in `saved` cannot be used; [] if it can be, or if `--use_ema` is not given."""
    if not objects.spec.uses_average or not is_rank_zero():
        return []
    if objects.spec.fits and objects.spec.lora is not None:
        return ["lora needs weights, not an average: write it as weights with `export --format ckpt --ema` (--use_ema)"]
    return [*filter(None, [average_problem(saved.values, saved.path, "--use_ema")])]
