"""Runs of one step for the planner, from the sizes that a test varies."""

from lit_llm.models.config import GPTConfig
from lit_llm.plan import Hardware, Layout, Memory, Optimizer, Options, PlannedRun, peak_memory
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.segments import Step
from lit_llm.plan.speed import step_times


def settings_of(model: GPTConfig, *, sequences: int, accumulation: int = 1, **settings) -> PlannedRun:
    """A run of one step with `accumulation` micro-batches of `sequences` on each rank."""
    layout = settings.setdefault("layout", Layout())
    settings.setdefault("optimizer", Optimizer("AdamW", fused=True))
    batch = sequences * accumulation * layout.data_parallel
    return PlannedRun(model, max_steps=1, global_batch_size=batch, micro_batch_size=sequences, **settings)


def step_of(model: GPTConfig, sequences: int, *, cuda: bool = False, gradients_exist: bool = False, **settings) -> Step:
    """A micro-batch of that run."""
    run = settings_of(model, sequences=sequences, **settings)
    return Step(run, sequences, cuda=cuda, gradients_exist=gradients_exist)


def peak_of(model: GPTConfig, *, cuda: bool = True, **settings) -> Memory:
    """The peak memory of that run."""
    return peak_memory(settings_of(model, **settings), cuda=cuda)


def planned_mfu(settings: PlannedRun, hardware: Hardware, options: Options) -> float:
    """Useful FLOP/s over the dense peak while a rank computes, without recomputation and communication."""
    times = step_times(settings, hardware, options)
    flops = flops_per_token(settings.model, settings.lora, settings.block_size).total * settings.tokens_per_step
    peak = settings.layout.devices * settings.dense_peak(hardware) * 1e12
    return flops * times.recomputation / (times.compute * peak)
