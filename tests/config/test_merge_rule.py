"""What counts if several sources set a key: files, bases, overlays and flags. Classes: test_class_defaults.py."""

import pytest

from lit_llm.config.parse import parse
from lit_llm.core.errors import UserError


def test_flags_that_turn_a_group_off_and_give_its_arguments_contradict_each_other():
    for words in (["--schedule", "null", "--schedule.warmup_steps", "3"], ["--schedule.warmup_steps=3", "--schedule=null"]):
        with pytest.raises(UserError, match=r"schedule is null, but schedule.warmup_steps is given too.* \(--schedule,"):
            parse("fit", words)


def test_what_another_class_drops_but_defaults_is_announced_in_one_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schedule: {class_path: WSD, init_args: {warmup_steps: 3, decay_fraction: 0.4, shape: one_minus_sqrt}}")
    parse("fit", ["--config", str(recipe), "--schedule", "Linear"]).raise_problems()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"note: schedule is Linear instead of WSD, so these do not apply: schedule.decay_fraction=0.4 (in {recipe})"
    )
    for words in (["--schedule", "WSD"], ["--schedule", "null"], ["--schedule.decay_fraction", "0.5"], ["--optimizer", "Lion"]):
        parse("fit", ["--config", str(recipe), *words]).raise_problems()
        assert capsys.readouterr().err == ""


def test_flags_override_files_wherever_they_stand(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {n_layer: 3}\nschedule: WSD")
    for words in (["--model.n_layer", "5", "--config", str(file)], ["--config", str(file), "--model.n_layer", "5"]):
        assert parse("fit", words).config.model.n_layer == 5
    found = parse("fit", ["--schedule.decay_fraction", "0.5", "--config", str(file)]).config.schedule
    assert found.init_args.decay_fraction == 0.5


def test_a_later_dict_overrides_an_earlier_flag():
    words = ["--schedule", "WSD", "--schedule.decay_fraction", "0.5", "--schedule", "{init_args: {decay_fraction: 0.7}}"]
    assert parse("fit", words).config.schedule.init_args.decay_fraction == 0.7


def test_settings_without_keys_are_refused():
    for words in (["--model", "large"], ["--trainer", "3"], ["--loss", "[1]"]):
        (problem,) = parse("fit", words).problems
        assert problem.startswith(f"{words[0][2:]} is {words[1]!r}, but must be a dict of settings")


def test_arguments_beside_class_path_are_those_in_init_args(tmp_path):
    text = "{class_path: WSD, decay_fraction: 0.7, init_args: {warmup_steps: 3}}"
    (tmp_path / "recipe.yaml").write_text(f"schedule: {text}")
    for words in (["--config", str(tmp_path / "recipe.yaml")], ["--schedule", text]):
        found = parse("fit", words).config.schedule.init_args
        assert (found.decay_fraction, found.warmup_steps) == (0.7, 3)


def test_arguments_beside_class_path_are_those_of_an_entry_of_a_list_too():
    words = ["--trainer.callbacks+", "[{class_path: EarlyStopping, monitor: val/loss, init_args: {patience: 2}}]"]
    (entry,) = parse("fit", words).config.trainer.callbacks
    assert (entry.init_args.monitor, entry.init_args.patience) == ("val/loss", 2)


def test_an_argument_that_only_the_last_class_has_is_its_own_although_a_file_gives_it_before(tmp_path):
    """As in `--config quickstart --data TextFiles --config d.yaml`, where the flag applies after both files."""
    (tmp_path / "base.yaml").write_text("schedule: {class_path: Cosine, init_args: {warmup_steps: 3, min_ratio: 0.2}}")
    (tmp_path / "more.yaml").write_text("schedule: {decay_fraction: 0.7}")
    files = [word for name in ("base.yaml", "more.yaml") for word in ("--config", str(tmp_path / name))]
    recipe = parse("fit", ["--schedule", "WSD", *files])
    assert recipe.problems == () and recipe.config.schedule.class_path.endswith(".WSD")
    assert (recipe.config.schedule.init_args.decay_fraction, recipe.config.schedule.init_args.warmup_steps) == (0.7, 3)
    (note,) = recipe.notes  # the rate at the end of Cosine is not WSD's
    assert "schedule.min_ratio=0.2" in note and "decay_fraction" not in note


def test_a_wrong_value_that_a_later_source_replaces_is_no_mistake(tmp_path):
    (tmp_path / "wrong.yaml").write_text("model: {n_layer: many}")
    recipe = parse("fit", ["--config", str(tmp_path / "wrong.yaml"), "--model.n_layer", "3"])
    assert recipe.problems == () and recipe.config.model.n_layer == 3


def test_without_a_wrong_value_the_one_before_it_counts(tmp_path):
    """So that no other rule complains about a value that the user did not mean."""
    (tmp_path / "right.yaml").write_text("model: {n_layer: 3}")
    recipe = parse("fit", ["--config", str(tmp_path / "right.yaml"), "--model.n_layer", "many"])
    assert len(recipe.problems) == 1 and recipe.config.model.n_layer == 3


def test_mistakes_of_three_groups_and_two_of_one_group_come_together():
    words = [
        "--model.n_layer",
        "x",
        "--model.n_head",
        "y",
        "--optimizer.lr",
        "z",
        "--schedule",
        "Cosin",
        "--schedule.warmup_steps",
    ]
    problems = parse("fit", [*words, "3", "--data.pth", "a"]).problems
    assert [problem.removeprefix("unknown key ").split()[0].rstrip(";") for problem in problems] == [
        *("schedule", "model.n_layer", "model.n_head", "optimizer.lr", "data.pth")
    ]


def test_missing_arguments_of_two_classes_in_one_group_come_together():
    problems = parse("fit", ["--trainer.logger", "CSVLogger", "--trainer.callbacks+", "EarlyStopping"]).problems
    assert [name in " ".join(problems) for name in ("save_dir", "monitor")] == [True, True] and len(problems) == 2


def test_an_overlay_adds_a_source_of_a_mixture_and_replaces_its_phases(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "data: {class_path: Mixture, init_args: {sources: {a: {path: x}}, phases: [{weights: {a: 1}}]}}"
    )
    (tmp_path / "b.yaml").write_text("data: {sources: {b: {path: y}}, phases: [{weights: {a: 1, b: 3}}]}")
    data = parse("fit", ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]).config.data.init_args
    assert {name: source.path for name, source in data.sources.items()} == {"a": "x", "b": "y"}
    assert [phase.weights for phase in data.phases] == [{"a": 1, "b": 3}]


def test_the_path_of_a_strategy_is_its_class():
    strategy = parse("fit", ["--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"]).config.trainer.strategy
    assert strategy.class_path == "lightning.pytorch.strategies.DDPStrategy"
