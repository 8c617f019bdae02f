"""From arguments to a RunSpec. No objects are built and no files written here, and only recipe files are read."""

from __future__ import annotations

from typing import Any

from lit_llm.config.arguments import FLAGS, Arguments, needs_value, read
from lit_llm.config.class_defaults import fill_adamw
from lit_llm.config.groups import GROUPS, Command
from lit_llm.config.parse_errors import Mistakes
from lit_llm.config.parser import parser_of, parser_of_options
from lit_llm.config.ranges import null_problems, number_problems
from lit_llm.config.run_spec import RunSpec
from lit_llm.config.spelling import refuse_groups_without_keys
from lit_llm.config.tree import Tree
from lit_llm.config.warmup import settle_warmup, take_warmup
from lit_llm.core.errors import noting


def parse(command: Command, arguments: Arguments | list[str], weights: dict[str, Any] | None = None) -> RunSpec:
    """Return the `RunSpec` of the arguments of a command. Mistakes in values become its `problems`.

    Args:
        weights: {dotted key: setting that follows from the weights of `init_from`}. Recipe files and flags override these.

    Raises:
        UserError: A recipe file cannot be read, one source sets null and arguments for a key, or a mistake is in no one value.
    """
    if isinstance(arguments, list):
        arguments = read(arguments)
    arguments, problems = refuse_groups_without_keys(arguments)
    tree = Tree.of(arguments, weights or {})
    by_flag = any(a.source == FLAGS and a.key.startswith("trainer.logger") for a in tree.given.values())
    if command in ("validate", "test") and not by_flag:  # they log nothing: the package of a logger need not be here
        tree.remove(["trainer.logger"])
    warmup, of_warmup = take_warmup(tree)
    other_ends = _drop_earlier_alternatives(tree)
    problems += [*of_warmup, *arguments.problems, *map(needs_value, arguments.bare), *tree.problems]

    options, mistakes = parser_of_options(command), Mistakes(tree)
    names = vars(options.get_defaults())
    config = mistakes.convert(options, {key: value for key, value in tree.values.items() if key in names}, {})
    for group in GROUPS:
        config.update(mistakes.convert(parser_of(group), {group: tree.group(group)}, {group: Tree().group(group)}))
    problems += mistakes.sentences(config, unknown=tree.values.keys() - {*names, *GROUPS})
    notes = [*tree.notes, *other_ends]
    given = frozenset(tree.given)
    if command == "fit" and not (problems or null_problems(command, config) or number_problems(config, given)):
        notes += fill_adamw(config, given) if tree.class_name("optimizer") == "AdamW" else []
        with noting(problems):
            notes += settle_warmup(warmup, config) if warmup is not None else []
    return RunSpec(command, arguments, tree, config, given, tuple(problems), tuple(notes), warmup)


_ALTERNATIVES = (
    (("trainer.max_steps",), ("trainer.max_epochs",)),  # if one source sets both, a run ends at the first
    (("data.paths",), ("data.train", "data.val")),
)
"""Pairs of alternatives. If a source sets keys of one alternative, earlier sources' values for the other no longer count."""


def _drop_earlier_alternatives(tree: Tree) -> list[str]:
    """Of two alternatives (`_ALTERNATIVES`), remove the values that earlier sources set. Return a sentence for each value.

    So `--trainer.max_epochs 2` removes a `max_steps` that a recipe sets. A source that sets both alternatives keeps both.
    """
    notes = []
    for sides in _ALTERNATIVES:
        given = [a for a in tree.given.values() if a.key in sum(sides, ()) and a.value not in (None, -1, "null", "-1")]
        chosen = next((side for side in sides if given and given[-1].key in side), ())
        others = [a for a in given if a.key not in chosen]
        if any(a.source == given[-1].source for a in others):  # a source that sets both means both
            continue
        by = given[-1:] and f"{given[-1].key} {given[-1].value} {given[-1].where}"
        notes += [f"{a.key} {a.value} of {a.origin} is replaced by {by}" for a in others]
        tree.remove(a.key for a in others)
    return notes
