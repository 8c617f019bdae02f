"""Planned tokens per second against published runs (benchmarks/published.yaml), and the formula of `speed` by hand."""

from dataclasses import replace

import pytest
from planned_steps import planned_mfu
from published_runs import Run, runs

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.config import GPTConfig
from lit_llm.models.experts_config import MoEConfig
from lit_llm.plan import Hardware, Layout, Optimizer, Options, PlannedRun, find
from lit_llm.plan.memory import most_memory, peak_memory, resolved
from lit_llm.plan.speed import Constants, Work, band, fitted_seconds, gpu_seconds, step_times


def tokens_per_second(run: Run) -> float:
    """Of a device."""
    settings = resolved(run.settings, run.hardware)
    return settings.tokens_per_step / settings.layout.devices / step_times(settings, run.hardware, Options()).step


def ratio(run: Run) -> float:
    return tokens_per_second(run) / run.tokens_per_second


def named(group: str, name: str) -> list[Run]:
    return [run for run in runs() if run.group.startswith(group) and run.name.startswith(name)]


def test_work_takes_the_time_of_its_parts():
    constants = Constants(0.5, 0.8, 100.0, 0.2, 0.4, 3.0, 1.0, 2.0, 0.0, 0.0)
    # 10 s of products at width 400 and half the peak, 1 s of attention, 2 s of writing
    peaks = {"bf16": 10e-12, "tf32": None, "fp32": None, "fp8": 20e-12}
    hopper = replace(find("h100-sxm"), peak_tflops=peaks, memory_gbps=100e-9)
    work = Work(100.0, 1 / 400, 20.0, 1 / 100, 10.0, 200.0, 40.0, 1.0, 1.0)

    def seconds(device: Hardware = hopper, work: Work = work, **compute) -> float:
        model, optimizer = GPTConfig(vocab_size=100), Optimizer("AdamW")
        settings = PlannedRun(model, optimizer, 1, 1, precision="bf16-mixed", compute=ComputeConfig(**compute))
        return gpu_seconds(work, settings, device, constants)

    eager = 10 * 1.25 / 0.5 + 2 * 2 / 0.5 + 1 / 0.2 + 2 * 3 + 0.5
    assert seconds() == pytest.approx(eager)
    assert seconds(compile=True) == pytest.approx(eager - 2 * 2)
    float8 = eager - 10 * 1.25 / 0.5 / 2 - 2  # half the time of the blocks' products, two passes instead of three
    assert seconds(compile=True, float8=True) == pytest.approx(float8)
    assert seconds(attention="flash3") == pytest.approx(eager - 1 / 0.2 + 1 / 0.4)
    ampere = 10 * 1.25 / 0.8 + 2 * 2 / 0.8 + 1 / 0.4 + 2 * 3 + 0.5
    assert seconds(device=replace(hopper, compute_capability=8)) == pytest.approx(ampere)
    assert seconds(work=replace(work, kernels=2e7)) == pytest.approx(100.5)  # kernels are started too late


def test_eager_compiled_and_float8_reach_what_was_published_on_8_and_128_gpus():
    eight, many = named("torchtitan, 96", "table 1"), named("torchtitan, 96", "table 3")
    computes = [run.settings.compute for run in eight]
    assert [(compute.compile, compute.float8) for compute in computes] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    for run in eight + many:
        assert ratio(run) == pytest.approx(1, abs=0.15), str(run)
    # 97.3 %, 97.7 % and 98.2 % of the speed of eight
    for one, other in zip(eight, many, strict=True):
        kept, published = tokens_per_second(other) / tokens_per_second(one), other.tokens_per_second / one.tokens_per_second
        assert kept == pytest.approx(published, abs=0.02)


def test_narrow_models_reach_less_of_the_peak():
    narrow, wide = (named("llm-foundry, A100", name)[0] for name in ("125M", "7B"))
    found = [planned_mfu(run.settings, run.hardware, Options()) for run in (narrow, wide)]
    assert found == pytest.approx([0.445, 0.642], rel=0.15)  # as published


def test_hardware_without_figures_has_no_fitted_speed():
    run, h100 = runs()[0], find("h100-sxm")
    assert fitted_seconds(run.settings, replace(h100, memory_gbps=None)) is None
    assert planned_mfu(run.settings, replace(h100, memory_gbps=None), Options()) == pytest.approx(0.4)
    assert fitted_seconds(run.settings, find("t4")) is None  # has no bf16


def test_a_band_widens_with_what_the_fit_does_not_know():
    run = named("torchtitan, 96", "table 4")[0]  # FSDP and tensor parallelism in float8
    settings, times = run.settings, step_times(run.settings, run.hardware, Options())
    planned, sent = times.compute + times.exposed, times.communication
    least, most = band(settings, run.hardware, times, Options())
    assert least == pytest.approx(times.compute / (1.3 * 1.15) / planned)  # nothing is waited for
    assert most == pytest.approx((times.compute * 1.35 * 1.1 + sent) / planned)
    narrow = replace(settings, compute=replace(settings.compute, float8=False))
    unknown = {"": narrow, "device": narrow, "experts": replace(narrow, model=replace(settings.model, moe=MoEConfig(8)))}
    found = {}
    for name, each in unknown.items():
        hardware = find("b200") if name == "device" else run.hardware
        alone = replace(each, layout=Layout(), global_batch_size=1, micro_batch_size=1)
        found[name] = band(alone, hardware, step_times(alone, hardware, Options()), Options())
    assert found[""] == pytest.approx((1 / 1.3, 1.35))
    assert found["device"] == pytest.approx((1 / 1.3 / 1.15, 1.35 * 1.25))
    assert found["experts"] == pytest.approx((1 / 1.3 / 1.15, 1.35 * 2))
    given = Options(mfu=0.4)
    assert band(settings, run.hardware, step_times(settings, run.hardware, given), given) is None


@pytest.mark.slow
@pytest.mark.parametrize("of", ["groups", "mixtures", "unseen"])
def test_no_published_run_is_outside_its_band(of):
    for run in runs(of=of):
        settings = resolved(run.settings, run.hardware)
        times = step_times(settings, run.hardware, Options())
        least, most = band(settings, run.hardware, times, Options())
        measured = settings.tokens_per_step / settings.layout.devices / run.tokens_per_second
        assert least <= measured / times.step <= most, str(run)
    for run in runs(of=of, memory=True):
        settings = resolved(run.settings, run.hardware)
        most = most_memory(settings, peak_memory(settings, cuda=True))
        is_known = run.group != "LitGPT" or not run.settings.layout.fsdp2  # these take more than one GPU alone does
        assert (run.memory_gib * 2**30 <= most) is is_known, str(run)


@pytest.mark.slow
def test_published_runs_are_within_15_percent():
    off = [(abs(ratio(run) - 1), str(run)) for run in runs()]
    assert len(off) == 80 and len({run.group for run in runs()}) == 12
    assert sum(each <= 0.15 for each, _ in off) >= 74 and max(off) <= (0.25, "")
    good = ("torchtitan", "llm.c", "nanochat", "lit_llm", "fms-fsdp", "llm-foundry, H100")
    assert not [found for found in off if found[0] > 0.15 and found[1].startswith(good)]
