"""Mistyped keys are reported before torch and Lightning are imported, and nothing valid is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.config.arguments import leaves, read
from lit_llm.config.groups import CLASSES, PLAIN
from lit_llm.config.parser import known_classes
from lit_llm.config.recipe_files import shipped
from lit_llm.config.resolve import resolved
from lit_llm.config.spelling import arguments_of, is_unknown, known_keys

SCRIPT = """
import sys
from lit_llm.__main__ import main
code = main(sys.argv[1:])
print(code, sorted({"torch", "lightning", "jsonargparse"} & set(sys.modules)))
"""
QUICK = ["--config", "quickstart"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", *QUICK, "--model.n_layr", "3"], "unknown key model.n_layr; did you mean model.n_layer?"),
        (["fit", *QUICK, "--data.globl-batch-size=3"], "did you mean data.global_batch_size?"),
        (["validate", *QUICK, "--trainer.limit_val_batchs", "3"], "did you mean trainer.limit_val_batches?"),
        (["check", *QUICK, "--full-batch", "true", "--warmup_steps", "3"], "did you mean schedule.warmup_steps?"),
        (["plan", *QUICK, "--devices=3", "--optimizer.momntum", "0.9"], "did you mean optimizer.momentum?"),
        (["recipes", "show", "quickstart", "--model.n_lair", "2"], "did you mean model.n_layer?"),
        (["fit", "--config", "quikstart"], "did you mean quickstart?"),
        (["fit", *QUICK, "--config", "broken.yaml"], "broken.yaml is not valid YAML at line 2"),
        (
            ["fit", *QUICK, "fast"],
            "unexpected argument 'fast'; write values after their flag, like --model.n_layer 4, and several as a list",
        ),
        (["fit", "--data.paths", "a.txt"], "name other data, with --data TextFiles for text files (--data.paths, in"),
        (
            ["validate", *QUICK, "--resume", "auto"],
            "resume is a flag of fit, not of validate: name the checkpoint with --ckpt_path",
        ),
        (["test", *QUICK, "--replace", "true"], "replace is a flag of fit and prepare, not of test"),
        (["fit", *QUICK, "--ckpt_path", "best"], "name the checkpoint with --resume (--ckpt_path, in"),
        (["trian"], "unknown command 'trian'"),
        (["fit", "--config"], "--config needs a value"),
    ],
)
def test_a_mistake_in_spelling_is_reported_without_torch(tmp_path, arguments, message):
    (tmp_path / "broken.yaml").write_text("model:\n  n_layer: @3\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert message in done.stderr and done.stdout == "2 []\n", done.stdout + done.stderr


def test_data_of_an_imported_run_need_the_name_of_their_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("data: {class_path: PythonStdlib}\n")  # as `import` writes it, for the tokenizer
    for key, classes in (("path", "TokenShards for token shards"), ("val", "TokenShards for token shards or --data TextFiles")):
        assert main(["validate", "--run", "run", f"--data.{key}", "chats"]) == 2
        said = f"unknown key data.{key}; the data of this run have none: name other data, with --data {classes}"
        assert capsys.readouterr().err.startswith(f"error: {said}")


OFTEN = ("trainer", "optimizer", "data", "schedule")


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group in OFTEN else pytest.mark.slow) for group in (*PLAIN, *CLASSES)]
)
def test_the_keys_read_from_source_are_those_of_the_parser(group):
    """For every class of ours that the group can name."""
    if group in PLAIN:
        values = yaml.safe_load(resolved([f"--{group}={{}}"]))[group]
        assert set(values) <= arguments_of(PLAIN[group])
        return
    for cls in known_classes(group).values():
        if not cls.__module__.startswith("lit_llm."):
            continue
        names = arguments_of(f"{cls.__module__}.{cls.__name__}")
        required = {"batch_ramp": ["--batch_ramp.tokens_per_batch", "[[0, 16]]"]}.get(group, [])
        required = ["--samples.prompts", "[a]", "--samples.every_n_steps", "1"] if group == "samples" else required
        required = ["--tasks.tasks", "[a.jsonl]"] if group == "tasks" else required
        required = ["--data.sources", "{}", "--data.phases", "[]"] if cls.__name__ == "Mixture" else required
        chosen = yaml.safe_load(resolved([f"--{group}", cls.__name__, *required]))[group]
        assert set(chosen.get("init_args", {})) <= names, cls
        assert arguments_of(f"{CLASSES[group].package}.{cls.__name__}") == names, cls


@pytest.mark.parametrize("name", shipped())
def test_no_key_of_a_shipped_recipe_is_unknown(name):
    arguments = read(["--config", name])
    known = known_keys("fit", arguments)
    assert not [assignment for assignment in arguments.assignments if is_unknown(assignment, known)]
    everything = yaml.safe_load(resolved(["--config", name])) if name in ("quickstart", "llama2-7b") else {}
    assert not [key for key, _ in leaves(everything) if key.partition(".")[0] not in known]


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "my_project.Mine", "--schedule.anything", "1"],
        ["--data", "my_project.Mine", "--data.anything", "1"],
        ["--optimizer", "torch.optim.SGD", "--optimizer.dampening", "0"],
        ["--optimizer", "AdamW", "--optimizer.amsgrad", "true"],
        ["--trainer.callbacks+", "my_project.Mine"],
        ["--trainer.strategy.tensor_parallel", "2"],
        ["--architecture", "my_project.Model", "--architecture.width", "3"],
        ["--data.init_args.tokenizer.init_args.vocab_size", "300"],
        ["--schedule", "{class_path: WSD, init_args: {decay_fraction: 0.5}}"],
        ["--schedule.decay_fraction", "0.5", "--schedule", "WSD"],
        ["--model", "{n_layer: 3}"],
        ["--resume", "auto", "--seed-everything", "3", "--trainer.max-steps=4"],
    ],
)
def test_what_can_be_valid_is_left_to_the_parser(words):
    arguments = read(words)
    known = known_keys("fit", arguments)
    assert not [assignment for assignment in arguments.assignments if is_unknown(assignment, known)]


def test_the_other_mistakes_are_reported_in_the_same_run(folder, capsys):
    from lit_llm.__main__ import main

    assert main(["fit", "--config", "tiny.yaml", "--model.n_layr", "3", "--model.n_head", "3"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "n_layr" in first and "n_head=3" in second
    assert main(["fit", "--config", "tiny.yaml", "--model.n_layr", "3"]) == 2  # although nothing else is wrong
    assert not Path("runs").exists()
