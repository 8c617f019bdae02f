"""Which errors of constructors are reported as mistakes, and which keep their traceback."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import CSVLogger

from lit_llm.__main__ import main
from lit_llm.callbacks import Cosine, SpikeGuard, ValidateEvery
from lit_llm.config import preflight
from lit_llm.core.errors import UserError
from lit_llm.models.custom import Architecture
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
    assert capsys.readouterr().err == "error: every_n_steps is 3, it must be even (--validation)\n"
    assert main(["fit", "--debug", "--config", "tiny.yaml", *flags]) == 2
    err = capsys.readouterr().err
    assert "ValueError: every_n_steps is 3" in err and "in __init__" in err
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
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup'"):
        Cosine(warmup=3)


class Net(torch.nn.Module):
    def __init__(self, vocab_size, width, depth: int) -> None:
        super().__init__()
        if width < 0:
            raise ValueError(f"width is {width}, it must be positive")

    def forward(self, input_ids):
        return input_ids


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


def test_a_value_that_an_architecture_refuses_is_a_mistake():
    with pytest.raises(UserError, match=r"width is -1, it must be positive \(--architecture\)"):
        Architecture(f"{__name__}.Net", {"width": -1, "depth": 1}).build(vocab_size=7)


BOARD = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "logs"}}
ROWS = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}


@pytest.mark.parametrize("logger", [BOARD, [ROWS, BOARD]])
def test_an_argument_that_a_class_gives_to_its_base_class_is_not_asked_for(folder, capsys, logger):
    """TensorBoardLogger takes `save_dir` and gives it to Lightning Fabric's logger as `root_dir`."""
    Path("logger.yaml").write_text(yaml.dump({"trainer": {"logger": logger}}))
    assert main(["fit", "--config", "tiny.yaml", "--config", "logger.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"] == logger


@pytest.mark.parametrize("board", [BOARD | {"init_args": {}}, "TensorBoardLogger"])
def test_of_two_loggers_the_one_that_lacks_an_argument_is_named(folder, capsys, board):
    Path("logger.yaml").write_text(yaml.dump({"trainer": {"logger": [ROWS, board]}}))
    assert main(["fit", "--config", "tiny.yaml", "--config", "logger.yaml"]) == 2
    assert "TensorBoardLogger, which needs save_dir" in capsys.readouterr().err


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


class Silent(torch.nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()


class Lightnings(LightningModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()


@pytest.mark.parametrize(("name", "said"), [("Lightnings", "a LightningModule: a recipe trains"), ("Silent", "has no forward")])
def test_an_architecture_that_would_not_train_as_its_author_means_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        Architecture(f"test_constructor_errors.{name}").build(32)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "mydta.TextFiles"], "there is no module mydta ("),
        (
            ["--schedule", "test_constructor_errors.Cosin"],
            "module test_constructor_errors has no class Cosin; did you mean Cosine?",
        ),
        (["--trainer.callbacks+", "EarlyStoping"], "there is no callback EarlyStoping; did you mean EarlyStopping?"),
        (["--trainer.callbacks", "[{class_path: mydta.My}]"], "there is no module mydta ("),
        (["--trainer.logger", "TensorBoardLoger"], "there is no logger TensorBoardLoger; did you mean TensorBoardLogger?"),
    ],
)
def test_a_module_or_class_that_does_not_exist_is_named(folder, capsys, flags, said):
    assert main(["fit", "--config", "tiny.yaml", *flags]) == 2
    assert said in capsys.readouterr().err


class Batches(LightningDataModule):
    vocab_size = 32

    def __init__(self, kind: str) -> None:
        super().__init__()
        ids = torch.arange(16)
        self.sample = {"tuple": (ids, ids), "labels": {"input_ids": ids, "labels": ids}, "int32": None}[kind]
        self.sample = self.sample or {"input_ids": ids, "targets": ids.int()}

    def train_dataloader(self):
        return torch.utils.data.DataLoader([self.sample] * 8, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("command", "kind", "seen"),
    [
        ("fit", "tuple", "a list"),
        ("fit", "labels", "a dict of input_ids, labels"),
        ("fit", "int32", "input_ids (2, 16) int64 and targets (2, 16) int32"),
        ("check", "tuple", "a list"),
        pytest.param("validate", "labels", "a dict of input_ids, labels", marks=pytest.mark.slow),
        ("find-lr", "tuple", "a list"),
    ],
)
def test_a_batch_that_no_model_can_read_is_described(folder, capsys, command, kind, seen):
    recipe = yaml.safe_load(Path("tiny.yaml").read_text())
    recipe["data"] = {"class_path": "test_constructor_errors.Batches", "init_args": {"kind": kind}}
    Path("own.yaml").write_text(yaml.dump(recipe))
    flags = ["--seeds", "1", "--out", "rate.yaml"] if command == "find-lr" else []
    if command == "validate":
        assert main(["fit", "--config", "tiny.yaml"]) == 0
        flags = ["--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--model.vocab_size", "257"]
    assert main([command, "--config", "own.yaml", *flags]) == 2
    assert f"error: a batch of Batches is {seen}, but must be a dict of input_ids and targets" in capsys.readouterr().err
