"""`trainer.precision: auto`: what is chosen, where it is recorded, and that a run keeps it on another processor."""

import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import torch
import yaml
from ports import free_port
from recipe_runs import run

from lit_llm.config.build import build
from lit_llm.config.objects import RunObjects
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide, resolved
from lit_llm.core.hardware import table
from lit_llm.plan.planned_recipe import build_to_plan, planned_run
from lit_llm.training import auto_precision
from lit_llm.training.auto_precision import choose, choose_for

AUTO = ("--config", "tiny.yaml", "--trainer.precision", "auto")


@pytest.fixture
def processor(monkeypatch):
    """Call with whether the processor shall have units for bf16."""
    return lambda has_units: monkeypatch.setattr(auto_precision, "cpu_has_bf16_units", lambda: has_units)


def saved_precision(run_dir: str) -> str:
    return yaml.safe_load(Path(run_dir, "config.yaml").read_text())["trainer"]["precision"]


def built(*flags: str) -> RunObjects:
    return build(decide(parse("fit", [*AUTO, *flags])))


@pytest.mark.parametrize(("has_units", "chosen"), [(True, "bf16-mixed"), (False, "32-true")])
def test_each_kind_of_processor_gets_its_precision(folder, capsys, processor, no_gpu, has_units, chosen):
    processor(has_units)
    assert choose("auto").precision == chosen
    here = built()
    assert here.trainer.precision == here.config.trainer.precision == chosen
    assert f"note: trainer.precision auto is {chosen}: the processor has " in capsys.readouterr().err
    assert yaml.safe_load(resolved(list(AUTO)))["trainer"]["precision"] == "auto"  # a recipe, for any machine
    assert planned_run(build_to_plan(list(AUTO)))[0].precision == chosen


@pytest.mark.slow
def test_a_resume_and_an_evaluation_keep_the_precision_of_the_run(folder, capsys, processor):
    processor(True)
    run(capsys, "fit", *AUTO, "--trainer.max_steps", "3", "--trainer.limit_val_batches", "0")
    assert saved_precision("runs/tiny") == "bf16-mixed"
    processor(False)
    resumed = built("--resume", "auto")
    assert resumed.trainer.precision == "bf16-mixed"
    assert [change for change in resumed.spec.start.announced if "precision" in change] == []
    said = capsys.readouterr().err
    assert "trainer.precision auto is bf16-mixed: the precision of runs/tiny/checkpoints/step-" in said
    assert "(a new run would take 32-true)" in said
    assert build(decide(parse("validate", list(AUTO)))).trainer.precision == "bf16-mixed"
    assert "trainer.precision" not in capsys.readouterr().err, "only a run that trains says it"
    assert planned_run(build_to_plan([*AUTO, "--resume", "auto"]))[0].precision == "bf16-mixed"
    given = built("--resume", "auto", "--trainer.precision", "32-true")
    assert "trainer.precision bf16-mixed → 32-true" in given.spec.start.announced, "a value that is given counts"


def test_the_hardware_of_a_plan_decides_there(folder, capsys, processor):
    processor(True)
    with_bf16 = {name for name, hardware in table().items() if choose_for(hardware).precision == "bf16-mixed"}
    assert {"a100-80gb", "h100-sxm", "mi300x"} <= with_bf16 and not {"t4", "cpu"} & with_bf16
    code, out, err = run(capsys, "plan", *AUTO, "--hardware", "cpu")
    assert code == 0 and "32-true: weights" in out and "note: " not in err


def test_gpus_are_asked_for_bf16(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    for supported, chosen in ((True, "bf16-mixed"), (False, "32-true")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert choose("auto").precision == choose("gpu").precision == chosen
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert choose("auto").precision == "32-true"


FIT = """
import os, sys
import lit_llm.training.auto_precision as auto_precision
auto_precision.cpu_has_bf16_units = lambda: os.environ["NODE_RANK"] == "0"
from lit_llm.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ranks_whose_processors_differ_are_refused(folder):
    flags = [*AUTO, "--trainer.strategy", "ddp", "--trainer.num_nodes", "2", "--trainer.devices", "1"]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    common |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    nodes = [
        fork_server.Popen(
            [sys.executable, "-c", FIT, "fit", *flags], env={**common, "NODE_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    said = [node.communicate(timeout=240)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    wanted = "trainer.precision is bf16-mixed on rank 0 and 32-true on rank 1"
    assert all(wanted in each for each in said), said
