"""Settings from a recipe, layouts, the arithmetic of a plan, and sweeps."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from planned_steps import planned_mfu
from torch import nn

from lit_llm.callbacks import WSD, StepCheckpoint
from lit_llm.core.number_text import count, duration, money, money_range, percent, size, two_digits
from lit_llm.data.mixture_order import Phase, PhaseDraws, SourceDraws, smallest_quotas
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallel_layout import layout_of_name
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.plan import DataFacts, Layout, Optimizer, Options, PlannedRun, as_dict, find, make_plan, sweep
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.memory import CONTEXT_GB, peak_memory
from lit_llm.plan.planned_recipe import steps_of_epochs
from lit_llm.plan.planned_run import Schedule
from lit_llm.reporting.plan_text import SWEEP, markdown, render, sections, sweep_row

MODEL = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, mlp="gelu", tie_embeddings=True)


def run(**changes) -> PlannedRun:
    values = {"max_steps": 1000, "global_batch_size": 64, "micro_batch_size": 8, "precision": "bf16-mixed", **changes}
    return PlannedRun(MODEL, Optimizer("AdamW", fused=True), **{"loss": LossConfig(chunk_size=8192), **values})


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_names_and_classes_of_strategies_are_one_layout():
    assert layout_of_name("auto", 1, 8) == layout_of_name("ddp", 1, 8) == Layout("single")
    assert layout_of_name("ddp", 4, 8) == Layout("ddp", replicate=4, bucket_copies=True)
    assert layout_of(DDPStrategy(gradient_as_bucket_view=True), 4, 8) == Layout("ddp", replicate=4)
    assert layout_of(DDPStrategy(), 4, 8) == layout_of("ddp_find_unused_parameters_true", 4, 8) == layout_of_name("ddp", 4, 8)
    assert layout_of(FSDPStrategy(), 4, 8) == layout_of_name("fsdp", 4, 8)
    assert layout_of(SingleDeviceStrategy(), 1, 8) == Layout()
    found = layout_of(MeshStrategy(replicate=2, tensor_parallel=2), 16, 8)
    assert (found.replicate, found.shard, found.tensor_parallel, found.shards) == (2, 4, 2, "parameters")
    assert layout_of_name("fsdp2", 8, 8).shard == 8 and layout_of_name("hsdp", 16, 8).replicate == 2


@pytest.mark.parametrize(
    ("strategy", "devices", "said"),
    [
        ("single", 2, "one device"),
        (MeshStrategy(tensor_parallel=4), 6, "use 4 or 8"),
        (SimpleNamespace(), 2, "SimpleNamespace is not known to train one model on 2 processes"),
    ],
)
def test_an_impossible_layout_names_possible_ones(strategy, devices, said):
    with pytest.raises(ValueError, match=said):
        layout_of(strategy, devices, 8)


def test_a_batch_that_does_not_divide_names_sizes_that_do():
    with pytest.raises(ValueError, match=r"64 is not a multiple of 7 data-parallel ranks: use 63 or 70 "):
        make_plan(run(layout=Layout("ddp", replicate=7)), find("h200"))


def test_built_objects_become_settings():
    data = SimpleNamespace(global_batch_size=8, micro_batch_size=2, block_size=None, ramp=None)
    parts = {
        "data": data,
        "loss": LossConfig(chunk_size=100),
        "compute": ComputeConfig(2, matmul_precision="high"),
        "schedule": WSD(warmup_steps=5, decay_fraction=0.2),
        "checkpoint": StepCheckpoint(every_n_steps=50, keep_last=3),
    }
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    facts, ddp = DataFacts(1_000_000, 1000, "counted"), Layout("ddp", replicate=2)
    found = PlannedRun.of(parts, MODEL, optimizer, ddp, "bf16-mixed", 100, data=facts)
    assert (found.max_steps, found.accumulation, found.layout.replicate) == (100, 2, 2)
    assert found.schedule.kind == "WSD" and found.precision == "bf16-mixed"
    assert (found.loss.chunk_size, found.compute) == (100, ComputeConfig(2, matmul_precision="high"))
    assert (found.validation_every_n_steps, found.checkpoint_every_n_steps, found.checkpoint_keep_last) == (None, 50, 3)
    assert found.optimizer == Optimizer("AdamW", fused=True)
    # epochs as `fit` counts them: whole blocks, and the last step is a full one
    assert steps_of_epochs(found, 2) == -(-2 * (999_999 // 1024) // 8)
    assert steps_of_epochs(replace(found, block_size=512), 2) == -(-2 * (999_999 // 512) // 8)
    # with a ramp: 10 steps of 4 are 40 samples, the others are of 8
    assert steps_of_epochs(replace(found, ramp=((0, 4), (10, 8))), 2) == 10 + -(-(2 * (999_999 // 1024) - 40) // 8)
    with pytest.raises(ValueError, match=r"--trainer\.max_steps"):
        steps_of_epochs(replace(found, data=DataFacts()), 2)


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_time_is_flops_over_peak_and_mfu_and_money_is_time():
    plan = make_plan(run(), find("h100-sxm"), Options(mfu=0.5, price_usd_hour=3.0))
    step = flops_per_token(MODEL).total * 64 * 1024 / (0.5 * 989e12)
    assert plan.times.step == pytest.approx(step) and plan.run_seconds == pytest.approx(1000 * step)
    assert plan.usd == (pytest.approx(1000 * step / 3600 * 3),) * 2
    assert plan.mfu == pytest.approx(0.5) and plan.mfu_origin == "given"
    mfu, fitted = planned_mfu(run(), find("h100-sxm"), Options()), make_plan(run(), find("h100-sxm"))
    assert fitted.times.step == pytest.approx(step * 0.5 / mfu) and fitted.mfu_origin == "fitted to published runs"
    processor = replace(find("cpu"), peak_tflops=dict.fromkeys(("bf16", "tf32", "fp32", "fp8"), 1.0), memory_gbps=10)
    assert (
        planned_mfu(run(), processor, Options()) == pytest.approx(0.4) and make_plan(run(), processor).mfu_origin == "assumed"
    )


def test_a_ramp_is_counted_by_its_tokens():
    # 400 steps of 16, 400 of 32 and 200 of 64 sequences: half of 1000 steps of 64 sequences, 64,000, which are 32,000
    data = DataFacts(32_000 * 1024, 1000, "counted")
    half = make_plan(run(ramp=((0, 16), (400, 32), (800, 64)), data=data, validation_every_n_steps=100), find("h100-sxm"))
    whole = make_plan(run(data=data, validation_every_n_steps=100), find("h100-sxm"))
    assert half.run_seconds == pytest.approx(whole.run_seconds / 2) and half.usd[0] == pytest.approx(whole.usd[0] / 2)
    assert half.times == whole.times and half.validation_seconds == whole.validation_seconds
    raw, before = as_dict(half), as_dict(whole)
    assert raw["settings"]["tokens"] == 32_000 * 1024 and raw["epochs"] == 1
    assert raw["flops_per_run"] == pytest.approx(before["flops_per_run"] / 2)
    assert raw["settings"]["ramp"][1] == (400, 32) and before["settings"]["ramp"] == ()
    page, plain = markdown(half), markdown(whole)
    said = "16 sequences from step 1 on, 32 sequences from step 401 on, 64 sequences from step 801 on"
    assert said in page and "assuming the speed of the final batch throughout" in page
    assert "batch ramp" not in plain and "final batch" not in plain


def test_a_mixture_has_a_table_by_phase_and_source():
    # 64,000 sequences of 1,024: 80/20 for 57,600 of them, then 25/75. "code" has 2,560 blocks: 11,520 / 2,560 = 4.5 epochs
    first, last = (
        PhaseDraws(end, period, off, {name: SourceDraws(n, n * 1024, *more) for name, n, *more in sources})
        for end, period, off, *sources in (
            (57_600, 5, 0.8, ("web", 46_080, 0.5, 1), ("code", 11_520, 4.5, None)),
            (64_000, 4, 0.75, ("web", 1_600, 0.517, 1), ("code", 4_800, 6.375, None)),
        )
    )
    data = DataFacts(10**8, 1000, "counted", phases=(first, last))
    plan = make_plan(run(data=data), find("h100-sxm"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(plan).splitlines() if "|" in line]
    table = lines[(start := lines.index(["phase", "source", "share", "tokens", "epochs by its end", "max_epochs"])) : start + 6]
    assert table[2:] == [
        ["to step 900 (90 %)", "web", "80 %", "47,185,920", "0.5", "1"],
        ["", "code", "20 %", "11,796,480", "4.5", ""],
        ["to step 1,000 (100 %)", "web", "25 %", "1,638,400", "0.517", "1"],
        ["", "code", "75 %", "4,915,200", "6.38", ""],
    ]
    (said,) = [text for label, text in lines[:start] if label == "data"]
    assert "code 6.38 epochs: beyond about 4, repeated data help less" in said and "web" not in said
    raw = json.loads(json.dumps(as_dict(plan)))
    drawn = raw["settings"]["data"]["phases"]
    assert raw["epochs"] is None and [phase["end"] for phase in drawn] == [57_600, 64_000]
    assert drawn[1]["sources"]["code"] == {"samples": 4_800, "tokens": 4_915_200, "epochs": 6.375, "max_epochs": None}
    assert "Mixture" not in markdown(make_plan(run(), find("h100-sxm")))


def test_weights_that_are_exact_only_over_many_steps_are_said():
    # 50.01/49.99: periods of 10,000, and 5,001 samples of one source in a row are 2,499.9999 ahead of its share.
    phase = Phase(64_000, smallest_quotas({"web": 50.01, "code": 49.99}))
    source = SourceDraws(32_006, 32_006 * 1024, 0.5, 1)
    planned = PhaseDraws(64_000, phase.period, phase.largest_deviation, {"web": source})
    page = markdown(make_plan(run(data=DataFacts(10**8, phases=(planned,))), find("h100-sxm")))
    assert "exact every 10,000 sequences, and in between up to 2,500 sequences off, 39.1 steps" in page
    rounded = replace(planned, largest_deviation=64.0)  # one step
    assert "in between" not in markdown(make_plan(run(data=DataFacts(10**8, phases=(rounded,))), find("h100-sxm")))


def test_a_given_scaling_efficiency_replaces_planned_waiting():
    layouts = layout_of_name("fsdp2", 8, 8), Layout("mesh", pipeline=PipelineLayout(4, "1f1b"))
    for settings in (run(layout=layout, micro_batch_size=1) for layout in layouts):
        planned, given = (make_plan(settings, find("h200"), Options(scaling_efficiency=each)) for each in (None, 0.8))
        assert given.times.compute == planned.times.compute and given.efficiency == pytest.approx(0.8)
        assert given.times.step == pytest.approx(planned.times.compute / 0.8)
        low, high = given.band
        assert low == pytest.approx(1 / 1.3) and high == pytest.approx(1.35)  # of computing alone: speed.UNKNOWN, kernels
        assert "80% (given)" in markdown(given) and "not overlapped" not in markdown(given)


def test_energy_is_device_hours_at_rated_power():
    layout = layout_of_name("fsdp2", 8, 8)
    plan = make_plan(run(layout=layout), find("h100-sxm"))
    assert plan.mwh == pytest.approx(8 * plan.run_seconds / 3600 * 700 / 1e6) and "at 700 W a device" in markdown(plan)
    assert make_plan(run(layout=layout), find("b300")).mwh is None  # its power is unknown


def test_gpus_without_bf16_are_planned_in_fp16():
    plan = make_plan(run(), find("v100-32gb"))
    assert plan.run_seconds is None and "--trainer.precision 16-mixed" in markdown(plan)
    assert make_plan(run(precision="16-mixed"), find("v100-32gb")).peak_tflops == 125
    flags = [step.flag for step in make_plan(run(precision="32-true"), find("v100-32gb")).next_steps]
    assert "--trainer.precision 16-mixed" in flags and "--trainer.precision bf16-mixed" not in flags


@pytest.mark.parametrize("k", [1, 3, 5, 12])
def test_every_kth_block_saves_what_that_many_blocks_save(k):
    """Of 12 blocks, those numbered 0, k, 2k, … keep their input alone: 4 bytes a value of an fp32 stream."""
    none, full, some = (
        make_plan(run(compute=ComputeConfig(mode)), find("h200")).memory.parts["activations"] for mode in ("none", "full", k)
    )
    recomputed = len(range(0, 12, k))
    deeper = replace(run(compute=ComputeConfig("full")), model=replace(MODEL, n_layer=13))
    assert make_plan(deeper, find("h200")).memory.parts["activations"] - full == 4 * 8 * 1024 * 768
    assert none - some == pytest.approx((none - full) * recomputed / 12, rel=0.1)  # the one being recomputed is there once
    assert f"one block in {k}," in markdown(make_plan(run(compute=ComputeConfig(k)), find("h200")))


def test_recomputation_costs_time_and_not_mfu():
    plain, full = (make_plan(run(compute=ComputeConfig(mode)), find("h100-sxm"), Options(mfu=0.5)) for mode in ("none", "full"))
    d, f, length = 768, 3072, 1024
    plain_flops = 6 * (12 * (4 * d * d + 2 * d * f) + 50304 * d) + 12 * 14 * d * length
    again = 12 * (2 * (4 * d * d + d * f) + 4 * d * length)  # all of a block but its last product
    assert full.times.step / plain.times.step == pytest.approx(1 + again / plain_flops)
    assert full.flops == plain.flops


def test_a_run_that_does_not_fit_gets_flags_that_save_memory():
    settings = run(micro_batch_size=64, loss=LossConfig(), precision="32-true")
    plan = make_plan(settings, find("l4"))
    capacity = (24 - CONTEXT_GB) * 1e9
    assert plan.fits is False and plan.memory.total > capacity
    assert plan.next_steps[0][0].startswith("--loss.chunk_size")
    largest = plan.largest_micro_batch
    assert 0 < largest < 64 and 64 % largest == 0
    for micro, fits in ((largest, True), (2 * largest, False)):
        changed = run(micro_batch_size=micro, loss=LossConfig(), precision="32-true")
        assert (peak_memory(changed, cuda=True).needed <= capacity) is fits
    for flag, saved, *_ in plan.next_steps:
        assert saved > 0, flag


def test_unknown_figures_are_none():
    plan = make_plan(run(precision="32-true"), find("cpu"))
    assert plan.times.step is None and plan.usd is None and plan.fits is None and plan.times.limit is None
    assert "unknown" in markdown(plan)
    unknown = run()
    assert "unknown" in dict(sections(make_plan(unknown, find("h200")))[2].rows)["data"]
    b200 = make_plan(run(precision="32-true"), find("b200"))
    assert b200.peak_tflops is None and b200.run_seconds is None


def test_the_page_and_the_json_hold_the_same_figures():
    settings = run(
        validation_every_n_steps=100,
        checkpoint_every_n_steps=200,
        checkpoint_keep_last=2,
        data=DataFacts(10_000_000, 100_000, "counted"),
    )
    plan = make_plan(settings, find("a100-80gb"), Options(served_tokens=1e12, mtbf_hours=24))
    raw = json.loads(json.dumps(as_dict(plan)))
    page = markdown(plan)
    assert f"{raw['parameters']:,}" in page and raw["parameters"] == plan.parameters
    assert sum(raw["memory"]["parts"].values()) == raw["memory"]["total"]
    assert size(raw["memory"]["total"]) in page
    assert (
        raw["epochs"] == pytest.approx(1000 * 64 * 1024 / 1e7) and "6.55 epochs" in page and "repeated data help less" in page
    )
    assert raw["validations"] == 10 and raw["chinchilla_multiple"] == pytest.approx(6.5536e7 / (20 * plan.parameters))
    assert raw["validation_seconds"] == pytest.approx(plan.times.compute / 3 * 100_000 / 65_536)
    assert raw["checkpoint_bytes"] == 12 * plan.parameters
    assert raw["best_interval_seconds"] == pytest.approx((2 * plan.save_seconds * 86400) ** 0.5)
    served = 2 * plan.parameters * 1e12 / (plan.flops.total * plan.settings.tokens)  # FLOPs over those of training
    assert f"cost {money_range(*(usd * served for usd in plan.usd))} at the price" in page
    per_token = 6 * plan.parameters * plan.settings.tokens + 2e12 * plan.parameters
    assert f"{per_token:.4g} FLOPs with 1 T tokens served" in page and "24 h between failures" in page
    assert raw["copy_bytes"] == 0 and "background copy" not in page
    layout = Layout("hsdp", replicate=2, shard=32)  # a machine of 8 devices has 8 of the 32 parts
    sharded = make_plan(run(layout=layout, micro_batch_size=1, async_checkpoints=True), find("a100-80gb"))
    assert sharded.copy_bytes == pytest.approx(12 * plan.parameters / 4, abs=8)
    assert f"{size(sharded.copy_bytes)} of host memory on each machine" in markdown(sharded)


def test_the_first_three_lines_say_whether_it_fits_how_long_it_takes_and_what_it_costs():
    def first(settings, hardware, **options):
        lines = render(make_plan(settings, find(hardware), Options(mfu=0.5, **options)), width=100).plain.splitlines()
        return [line.split(maxsplit=1) for line in lines[:3]]

    bytes_needed = make_plan(run(), find("h100-sxm")).memory.needed
    needed, most = (size(factor * bytes_needed).partition(" (")[0] for factor in (1, 1.25))
    seconds = 1000 * flops_per_token(MODEL).total * 64 * 1024 / (0.5 * 989e12)
    assert first(run(), "h100-sxm", price_usd_hour=3.0) == [
        ["memory", f"fits: {needed} (at most {most}) of 79.00 GB per rank"],  # 80 GB, of which 1 for the driver
        ["time", f"about {duration(seconds)} on 1 x h100-sxm = {two_digits(seconds / 3600)} device-hours"],
        ["cost", f"about {money(seconds / 3600 * 3)} at the given price"],
    ]
    assert first(run(micro_batch_size=64, loss=LossConfig()), "l4")[0][1].startswith("DOES NOT FIT: ")
    unknown = first(run(precision="32-true"), "cpu")
    assert [label for label, _ in unknown] == ["memory", "time", "cost"] and all("unknown" in said for _, said in unknown)


def test_the_advice_names_a_mesh_if_nothing_else_fits():
    """FSDP2 gathers embedding and head whole, 0.5e9 parameters each; tensor parallelism splits them."""
    model = replace(MODEL, vocab_size=2**18, n_embd=2048, n_head=16, n_layer=4, block_size=512)
    layout = layout_of(MeshStrategy(), 4, 8)
    settings = run(layout=layout, micro_batch_size=1, compute=ComputeConfig("full"), loss=LossConfig(chunk_size=1024))
    settings = replace(settings, model=model)
    card = replace(find("h100-sxm"), memory_gb=12)
    plan = make_plan(settings, card)
    assert plan.fits is False
    flag, saved, *_ = plan.next_steps[-1]
    assert flag.startswith("--trainer.strategy.tensor_parallel ") and flag.endswith(" --trainer.strategy.shard auto")
    ranks = int(flag.split()[1])
    mesh = layout_of(MeshStrategy(tensor_parallel=ranks), 4, 8)
    other = make_plan(replace(settings, layout=mesh), card)
    assert other.fits and other.memory.needed == plan.memory.needed - saved


def test_numbers_read_well():
    assert [count(n) for n in (999, 1.5e3, 124e6, 1.557e9, 2e12)] == ["999", "1.5 k", "124 M", "1.56 B", "2 T"]
    assert [count(n) for n in (999.4, 999.6, 999_400, 999_600, 999_999_999)] == ["999", "1 k", "999 k", "1 M", "1 B"]
    assert size(2**30) == "1.07 GB (1.00 GiB)" and size(5e6) == "5.0 MB"
    assert [duration(s) for s in (0, 5e-5, 0.25, 90, 600, 7200, 4.54 * 86400)] == [
        "0 s",
        "50 µs",
        "250 ms",
        "90 s",
        "10 min",
        "2.0 h",
        "4.5 days",
    ]
    assert [two_digits(x) for x in (0, 0.01234, 0.996, 9.96, 97_177, 5e6)] == ["0", "0.012", "1.0", "10", "97,000", "5,000,000"]
    assert [money(x) for x in (2e-7, 0.7512, 8_918, 9_960, 129_437.42, 999_600, 1.25e9)] == [
        "less than $0.01",
        "$0.75",
        "$8,900",
        "$10k",
        "$130k",
        "$1.0M",
        "$1.2B",
    ]
    assert money_range(129_437.42, 318_000) == "$130k to $320k" and money_range(3.01, 2.99) == "$3.0"
    assert [percent(x) for x in (0.00164, 0.4, 0.9999)] == ["0.16%", "40%", "100%"]


def test_the_page_keeps_to_the_width(width=60):
    rising = Schedule("Own", lambda step: step / 1000)
    layout = layout_of_name("fsdp2", 64, 8)
    settings = run(
        layout=layout, micro_batch_size=1, validation_every_n_steps=100, checkpoint_every_n_steps=200, schedule=rising
    )
    lines = render(make_plan(settings, find("l4")), width=width).plain.splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_plans_every_combination_and_keeps_going_where_one_cannot_be():
    axes = sweep.parse(["devices=1,8,128", "strategy=ddp,fsdp2", "precision=bf16-mixed,32"])
    found = list(sweep.variants(axes, run(), partial(layout_of_name, "ddp"), find("a100-80gb"), Options()))
    assert len(found) == 12
    assert [v.plan is None for v in found] == [False] * 8 + [True] * 4 and "128" in found[-1].problem
    by_values = {tuple(v.values.values()): v.plan for v in found}
    assert by_values["8", "fsdp2", "32"].settings.precision == "32-true"
    assert not by_values["8", "ddp", "32"].settings.layout.bucket_copies, "strategy/ddp has views"
    assert by_values["8", "fsdp2", "bf16-mixed"].memory.total < by_values["8", "ddp", "bf16-mixed"].memory.total
    assert all(len(sweep_row(v)) == 3 + len(SWEEP) for v in found)


def test_the_cheapest_that_meets_the_limits_is_chosen():
    axes = sweep.parse(["devices=1,2,4,8", "micro_batch_size=1,2,4,8"])
    found = list(sweep.variants(axes, run(), partial(layout_of_name, "fsdp2"), find("a100-80gb"), Options()))
    hours = min(v.plan.run_seconds for v in found) / 3600
    fast = sweep.cheapest(found, max_memory_gb=None, deadline_hours=hours * 1.01)
    assert fast.values["devices"] == "8"
    small = sweep.cheapest(found, max_memory_gb=4.0, deadline_hours=None)
    assert small.plan.memory.needed <= 4e9
    assert sweep.cheapest(found, max_memory_gb=0.1, deadline_hours=None) is None
    least = min(v.plan.memory.needed for v in found)
    assert sweep.nearest(found, 0.1).plan.memory.needed == least, "none fits"
    assert sweep.nearest(found, None).plan.run_seconds == hours * 3600
    cheaper = [v for v in found if v.plan.memory.needed <= 4e9 and v.plan.usd[0] < small.plan.usd[0] * 0.999]
    assert not cheaper


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["colour=red", "devices"], "colour=red.*\n?.*devices"),
        (["strategy=magic"], "use single"),
        (["strategy=zero1"], "fsdp2 with --trainer.strategy.reshard_after_forward false.*reduce_each_micro_batch false"),
        (["precision=fp4"], "fp4.*float8, tf32"),
        (["devices=1", "devices=2"], "devices is swept twice"),
        (["activation_checkpointing=0"], "at least 1"),
    ],
)
def test_what_cannot_be_swept_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        list(sweep.variants(sweep.parse(words), run(), partial(layout_of_name, "ddp"), find("a100-80gb"), Options()))
