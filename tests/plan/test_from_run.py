"""The measured speed of a run is read from its folder and carried to other hardware and settings."""

from dataclasses import replace

import pytest
from planned_steps import planned_mfu

from lit_llm.commands import plan as command
from lit_llm.core.errors import UserError
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.plan import Layout, Optimizer, Options, PlannedRun, find, make_plan
from lit_llm.plan.measured_run import differences, measured_run, settings_values
from lit_llm.plan.speed import step_times, with_slowness
from lit_llm.reporting.plan_text import markdown
from lit_llm.runs.plan_record import PLAN, as_text, measured_launches

MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=500)
RUN = PlannedRun(MODEL, Optimizer("AdamW"), max_steps=100, global_batch_size=64, micro_batch_size=4, precision="bf16-mixed")
FLOPS = 6 * (2 * 12 * 64**2 + 64 * 512) + 12 * 2 * 64 * 64
"""Per token: four square attention matrices and an MLP of 4 x 64 in each layer, a head of 512 ids, and attention."""
H100, A100, CPU = find("h100-sxm"), find("a100-80gb"), find("cpu")


def launch(settings=RUN, hardware=H100, seconds=0.2):
    measured = {} if seconds is None else {"step_seconds": seconds, "rows": 7}
    return {"hardware": vars(hardware), "settings": settings_values(settings), "measured": measured}


@pytest.fixture
def run(tmp_path):
    """Writes the plan.json of a run, and reads it."""
    (tmp_path / "config.yaml").touch()

    def written(*launches):
        (tmp_path / PLAN).write_text(as_text(list(launches)))
        return measured_run(tmp_path)

    return written


def seconds(settings, hardware, speed=None):
    """Of a planned step."""
    return step_times(settings, hardware, Options(measured=speed)).step


def test_settings_are_the_same_after_a_file(run):
    settings = replace(
        RUN,
        model=replace(MODEL, layers={"window": [16, None]}, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        layout=Layout("mesh", 2, 4, auto=("weights",), pipeline=PipelineLayout(2, "zbv")),
        lora=LoRAConfig(rank=4),
        ramp=((0, 8), (10, 64)),
        block_size=32,
    )
    found = run(launch(settings, A100))
    assert found.settings == settings and found.hardware == A100
    assert (found.step_seconds, found.rows) == (0.2, 7)


def test_the_newest_launch_that_measured_counts_and_others_are_dropped(run, tmp_path):
    found = run(launch(seconds=0.1), launch(seconds=None), launch(seconds=0.3), launch(seconds=None))
    assert found.step_seconds == 0.3
    assert [each["measured"]["step_seconds"] for each in measured_launches(tmp_path)] == [0.1, 0.3]
    (tmp_path / PLAN).write_text("{")
    assert measured_launches(tmp_path) == []


@pytest.mark.parametrize("devices", [1, 8, 16])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_same_hardware_reproduces_the_measured_step(run, devices, strategy):
    layout = {
        "ddp": Layout("ddp", replicate=devices, bucket_copies=True),
        "fsdp2": Layout("mesh", shard=devices),
    }[strategy]
    settings = replace(RUN, layout=layout)
    speed = with_slowness(run(launch(settings)))
    assert seconds(settings, H100, speed) == pytest.approx(0.2, rel=1e-9)


def test_other_hardware_gets_the_planned_speed_times_the_measured_correction(run):
    speed = with_slowness(run(launch()))
    measured_mfu = FLOPS * 64 * 64 / (0.2 * 989e12)
    assert 1 / speed.slowness == pytest.approx(measured_mfu / planned_mfu(RUN, H100, Options()))
    expected = FLOPS * 64 * 64 / (312e12 * planned_mfu(RUN, A100, Options()) / speed.slowness)
    plan = make_plan(RUN, A100, Options(measured=speed))
    assert plan.times.step == pytest.approx(expected)
    assert "x the planned MFU" in markdown(plan) and f"as in {speed.run}" in markdown(plan)


def test_a_run_on_a_cpu_says_something_about_that_cpu_and_nothing_else(run):
    settings = replace(RUN, precision="32-true")
    speed = with_slowness(run(launch(settings, CPU)))
    assert seconds(settings, CPU, speed) == pytest.approx(0.2)
    assert seconds(replace(settings, global_batch_size=128), CPU, speed) == pytest.approx(0.4)
    assert seconds(settings, H100, speed) == seconds(settings, H100)
    assert "Not carried" not in speed.sentence(CPU)
    assert speed.sentence(H100).endswith("Not carried to h100-sxm: the dense peak of cpu is unknown")


def test_a_step_shorter_than_its_planned_communication_is_refused(run):
    settings = replace(RUN, layout=Layout("mesh", tensor_parallel=2))
    with pytest.raises(UserError, match="communication alone"):
        with_slowness(run(launch(settings, seconds=1e-7)))


def test_settings_that_affect_the_speed_and_differ_are_named():
    other = replace(RUN, model=replace(MODEL, n_layer=4, init_std=0.1), precision="32-true", max_steps=7)
    assert differences(RUN, other) == ["model.n_layer 2 → 4", "precision bf16-mixed → 32-true"]
    assert differences(RUN, RUN) == []


def edited(**changes):
    return {**launch(), **changes}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "has no measured step"),
        (as_text([launch()])[:300], "has no measured step"),
        (as_text([]), "has no measured step"),
        (as_text([launch(seconds=None)]), "has no measured step"),
        (as_text([launch(seconds=float("nan"))]), "cannot be used"),
        (as_text([edited(settings={**settings_values(RUN), "unknown": 1})]), "cannot be used"),
    ],
)
def test_a_run_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, content, reason):
    (tmp_path / "config.yaml").touch()
    if content is not None:
        (tmp_path / PLAN).write_text(content)
    with pytest.raises(UserError, match=reason) as caught:
        measured_run(tmp_path)
    assert "(--from_run)" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_run_and_a_second_speed_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yaml \(--from_run\)"):
        command.main(["--from-run", str(tmp_path)])
    for flag in (["--mfu", "0.3"], ["--from_certificate", "c.json"]):
        with pytest.raises(UserError, match="both decide the speed"):
            command.main(["--from_run", str(tmp_path), *flag])
