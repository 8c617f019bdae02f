"""Which errors of constructors are reported as mistakes, and which keep their traceback."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_llm.__main__ import main
from lit_llm.callbacks import Cosine, SpikeGuard, ValidateEvery
from lit_llm.config import preflight
from lit_llm.core.errors import UserError
from lit_llm.optim import Lion


class Strict(ValidateEvery):
    """A user's callback that refuses odd numbers."""

    def __init__(self, every_n_steps: int = 2) -> None:
        super().__init__(every_n_steps)
        if every_n_steps % 2:
            raise ValueError(f"every_n_steps is {every_n_steps}, it must be even")


class Odd(Callback):
    def __init__(self) -> None:
        raise ValueError("this callback refuses to exist")


def test_an_error_of_a_users_class_is_one_sentence(folder, capsys):
    flags = ["--validation", "test_constructor_errors.Strict", "--validation.every_n_steps", "3"]
    assert main(["fit", "--config", "tiny.yaml", *flags]) == 2
    assert capsys.readouterr().err == "error: every_n_steps is 3, it must be even\n"
    assert main(["fit", "--config", "tiny.yaml", "--trainer.callbacks+", "test_constructor_errors.Odd"]) == 2
    assert "this callback refuses to exist" in capsys.readouterr().err


def test_a_callback_names_an_argument_in_python_and_its_flag_on_the_command_line(folder, capsys):
    with pytest.raises(UserError) as caught:
        SpikeGuard(min_steps=200)
    assert "SpikeGuard(min_steps) is 200" in str(caught.value) and "--" not in str(caught.value)
    assert main(["fit", "--config", "tiny.yaml", "--spike_guard.min_steps", "200"]) == 2
    assert "(--spike_guard.min_steps)" in capsys.readouterr().err
    with pytest.raises(UserError, match="SpikeGuard"):  # the command's way of naming ends with it
        SpikeGuard(min_steps=200)
    with pytest.raises(TypeError, match=r"Cosine\."):
        Cosine(warmup=3)


class Net(torch.nn.Module):
    def __init__(self, vocab_size, width, depth: int) -> None:
        super().__init__()


class Counts(Callback):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()


class Peaked(Cosine):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width)


class Rows(CSVLogger):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__("logs")


CLASSES = {"architecture": "Net", "schedule": "Peaked", "trainer.callbacks+": "Counts", "trainer.logger": "Rows"}


@pytest.mark.parametrize("key", [*CLASSES, "trainer.callbacks"])
def test_a_missing_argument_of_a_users_class_is_named(folder, capsys, key):
    name, plain = CLASSES.get(key, "Counts"), key.removesuffix("+")
    path = f"{__name__}.{name}"
    dotted = [f"--{key}", path, f"--{plain}.width", "3"]
    one = [f"--{key}", f"[{{class_path: {path}, init_args: {{width: 3}}}}]"]
    for words, flag in [(dotted, f"--{plain}.depth")] * (key in CLASSES) + [(one, f"--{key}")] * (
        plain in ("trainer.callbacks",)
    ):
        assert main(["fit", "--config", "tiny.yaml", *words]) == 2
        assert capsys.readouterr().err == f"error: {plain} is {name}, which needs depth ({flag})\n"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("cls", "flags"), [(Cosine, []), (Lion, ["--optimizer", "Lion"])])
def test_a_bug_in_a_constructor_of_ours_keeps_its_traceback(folder, monkeypatch, cls, flags):
    init = cls.__init__

    code = "def broken(self, *args, **options):\n init(self, *args, **options)\n list(zip([1], [1, 2], strict=True))"
    ours = {"__name__": cls.__module__, "init": init}  # as if it were in the module of the class
    exec(code, ours)
    functools.update_wrapper(ours["broken"], init)
    monkeypatch.setattr(cls, "__init__", ours["broken"])
    with pytest.raises(ValueError, match="zip"):
        main(["fit", "--config", "tiny.yaml", *flags])


def test_a_logger_whose_package_is_missing_names_the_pip_command(folder, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "wandb" else find(name))
    logger = "{class_path: lightning.pytorch.loggers.WandbLogger}"
    assert main(["fit", "--config", "tiny.yaml", "--trainer.logger", logger]) == 2
    line = "error: WandbLogger needs a package that is not installed: pip install wandb (--trainer.logger)\n"
    assert capsys.readouterr().err == line
    assert main(["fit", "--config", "tiny.yaml", "--trainer.max_steps", "3"]) == 0
    recorded = Path("runs/tiny/config.yaml")
    config = yaml.safe_load(recorded.read_text())
    config["trainer"]["logger"] = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"notes": "of wandb"}}
    recorded.write_text(yaml.safe_dump(config))
    assert main(["validate", "--run", "runs/tiny"]) == 0, "validation logs nothing"
