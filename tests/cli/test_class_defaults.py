"""A class that is chosen begins with its own defaults; what somebody has set is kept."""

import inspect

import pytest
import torch
import yaml

from lit_llm import callbacks
from lit_llm.cli.resolved_config import resolved


def values(*arguments):
    return yaml.safe_load(resolved(list(arguments)))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adafactor"])
def test_an_optimizer_has_the_defaults_of_its_class(name):
    group = values("--optimizer", name)["optimizer"]
    built = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))])
    for option, value in group["init_args"].items():
        wanted = built.defaults[option]
        assert value == (list(wanted) if isinstance(wanted, tuple) else wanted), option


def test_a_schedule_has_the_defaults_of_its_class():
    own = inspect.signature(callbacks.WSD).parameters
    arguments = values("--schedule", "WSD")["schedule"]["init_args"]
    assert arguments == {name: own[name].default for name in arguments}


def test_what_was_set_stays_when_a_later_file_changes_the_class(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "schedule: {class_path: Cosine, init_args: {warmup_steps: 7}}\n"
        "optimizer: {class_path: AdamW, init_args: {weight_decay: 0.3, betas: [0.8, 0.9]}}"
    )
    (tmp_path / "overlay.yaml").write_text("schedule: {class_path: WSD}\noptimizer: {class_path: Lion}")
    found = values("--config", f"{tmp_path}/recipe.yaml", "--config", f"{tmp_path}/overlay.yaml", "--schedule.shape", "linear")
    assert found["schedule"]["init_args"]["warmup_steps"] == 7 and found["schedule"]["init_args"]["shape"] == "linear"
    assert found["schedule"]["init_args"]["final_ratio"] == inspect.signature(callbacks.WSD).parameters["final_ratio"].default
    assert found["optimizer"]["init_args"] == {"lr": 1e-4, "weight_decay": 0.3, "betas": [0.8, 0.9]}


def test_the_default_class_named_again_has_its_own_defaults(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "optimizer: {class_path: AdamW}\ndata: {class_path: TextFiles, init_args: {paths: x}}"
    )
    back = values("--config", f"{tmp_path}/recipe.yaml", "--optimizer", "MuonAdamW")
    assert back["optimizer"] == values()["optimizer"]


def test_flags_with_init_args_count_as_set():
    arguments = values("--optimizer", "AdamW", "--optimizer.init_args.lr", "0.01")["optimizer"]["init_args"]
    assert arguments["lr"] == 0.01
