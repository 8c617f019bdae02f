"""A warmup given as a share of the schedule's steps or in tokens: conversion to the schedule's argument `warmup_steps`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from jsonargparse import Namespace

from lit_llm.callbacks import BatchRamp
from lit_llm.config.arguments import COMMAND_LINE, Assignment
from lit_llm.config.class_defaults import all_arguments
from lit_llm.config.groups import WARMUPS
from lit_llm.config.parser import find_class
from lit_llm.config.tree import Tree
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, read_yaml
from lit_llm.runs.saved_run import SavedRun

STEPS, FRACTION, TOKENS = (f"schedule.{name}" for name in ("warmup_steps", *WARMUPS))
_IN_CONFIG = "schedule.init_args.warmup_steps"


def take_warmup(tree: Tree) -> tuple[Assignment | None, list[str]]:
    """Remove a warmup that is a share or in tokens from `tree`. If no later one is in steps, set 0 steps as a placeholder.

    Returns:
        (the share or tokens, for `settle_warmup`, or None if steps count or there is a mistake; a sentence for each mistake).
    """
    given = [_as_number(a) for key, a in tree.given.items() if key in (STEPS, FRACTION, TOKENS)]
    tree.remove((FRACTION, TOKENS))
    if all(a.key == STEPS for a in given):
        return None, []
    last = given[-1]
    twice = [a.key for a in given if a.source == last.source and a.key != last.key]
    problems = [f"the warmup is given as {key} and as {last.key}: keep one of them {last.where}" for key in twice[:1]]
    problems += [said for a in given if a.key != STEPS and (said := WARMUPS[a.key.partition(".")[2]].problem(a.key, a.value))]
    schedule = find_class("schedule", tree.class_name("schedule"))
    if schedule is not None and "warmup_steps" not in all_arguments(schedule):
        problems.append(f"{last.key} is given, but {schedule.__name__} has no warmup {last.where}")
    if problems or last.key == STEPS:
        return None, problems
    tree.set(Assignment(STEPS, 0, COMMAND_LINE))
    return last, []


def _as_number(warmup: Assignment) -> Assignment:
    """Return the assignment; if its value is text, with the value that the text means in YAML."""
    try:
        return replace(warmup, value=read_yaml(warmup.value)) if isinstance(warmup.value, str) else warmup
    except InvalidYaml:
        return warmup  # no number: the range reports it


def settle_warmup(warmup: Assignment, config: Namespace) -> list[str]:
    """In a parsed recipe, set `schedule.warmup_steps` to the steps of `warmup`. Return [a note if these are 0 steps], or [].

    Raises:
        UserError: The number of steps does not follow from the recipe, or is larger than the number of the schedule's steps.
    """
    trainer, total = config.trainer, config.schedule.init_args.get("total_steps")
    if total is None and trainer.max_epochs in (None, -1) and trainer.max_steps != -1:
        total = trainer.max_steps
    if warmup.key == FRACTION and total is None:
        raise UserError(
            f"{FRACTION} is a share of the schedule's steps, whose number epochs tell only when the data are open: give "
            f"trainer.max_steps without trainer.max_epochs, {STEPS} or {TOKENS} {warmup.where}"
        )
    steps = round(warmup.value * total) if warmup.key == FRACTION else _steps_of_tokens(math.ceil(warmup.value), config)
    if total is not None and steps > total:
        raise UserError(f"{warmup.key} {warmup.value:g} is {steps:,} steps, but the schedule has {total:,} {warmup.where}")
    config[_IN_CONFIG] = steps
    return [] if steps else [f"{warmup.key} {warmup.value:g} is 0 steps: the first has the full rate {warmup.where}"]


def _steps_of_tokens(tokens: int, config: Namespace) -> int:
    """Return the fewest steps that read `tokens` tokens, in the batches of the ramp if there is one."""
    own = config.trainer.callbacks
    for ramp in (config.batch_ramp, *(own if isinstance(own, list) else [own])):
        if ramp is not None and ramp.class_path.endswith(".BatchRamp"):
            with suppress(UserError):  # `objects` reports its problems
                return BatchRamp(ramp.init_args.tokens_per_batch).steps_for(tokens)
    data = config.data.init_args
    if "global_batch_size" not in data:
        raise UserError(f"{TOKENS} needs data with a global_batch_size: give {STEPS} (--{TOKENS})")
    return -(-tokens // (data.global_batch_size * (data.block_size or config.model.block_size)))


def keep_warmup(warmup: Assignment, config: Namespace, saved: SavedRun | None) -> list[str]:
    """In `config`, set the warmup to the steps recorded in `saved`, the continued checkpoint, if any; return [a note] or []."""
    now, kept = config.get(_IN_CONFIG), None if saved is None else saved.settings.get(STEPS)
    if kept is None or now in (None, kept):
        return []
    config[_IN_CONFIG] = kept
    return [f"the warmup stays at the checkpoint's {kept:,} steps, not {now:,} {warmup.where}; {STEPS} changes it"]
