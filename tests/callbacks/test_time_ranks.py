"""TimeBreakdown, Stragglers and Profile on real gloo processes, with sleeps that dominate all other times."""

import gzip
import json

import pytest
from foreign import run_ranks

pytestmark = pytest.mark.soak

NAP = 0.3

SCRIPT = (
    f"NAP = {NAP}\n"
    + """
import time
import torch.distributed as dist
from lit_llm.callbacks import *
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(NAP)
        return grad

class Sleepy(Foreign):
    # Sleeps in one place, on one rank or on all.
    def __init__(self, where, rank, sharded, **kwargs):
        super().__init__(**kwargs)
        self.where, self.rank, self.sharded = where, rank, sharded

    def is_slow(self, where):
        return where == self.where and self.rank in (None, self.global_rank)

    def nap(self, where):
        if self.is_slow(where):
            time.sleep(NAP)

    def training_step(self, batch, batch_idx):
        self.nap("forward")
        loss = super().training_step(batch, batch_idx)
        return Sleep.apply(loss) if self.is_slow("backward") else loss

    def configure_optimizers(self):
        optimizer, module = super().configure_optimizers(), self
        step = optimizer.step
        def slow(closure=None):
            result = step(closure)
            module.nap("optimizer")
            return result
        optimizer.step = slow
        return optimizer

    def train_dataloader(self):
        module = self
        class Slow(Batches):
            def __getitem__(self, i):
                module.nap("data")
                return super().__getitem__(i)
        return DataLoader(Slow(10**6), batch_size=None, sampler=FromGlobalStep(self.trainer, self.steps))

    def configure_model(self):
        if self.sharded:
            for part in (self.embed, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

class Collective(Callback):
    # What a norm over shards or a spike guard does.
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.nap("collective")
        dist.all_reduce(torch.ones(2))

class SlowIO(TorchCheckpointIO):
    def save_checkpoint(self, *args, **kwargs):
        time.sleep(NAP)
        super().save_checkpoint(*args, **kwargs)

class Pause(Callback):
    # All ranks stand still, in a save and in a validation: neither is any rank's step.
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        time.sleep(2 * NAP)

    def on_validation_start(self, trainer, pl_module):
        time.sleep(2 * NAP)

def run(where=None, rank=None, sharded=False, every=4, steps=4, extra=(), measuring=None, **kwargs):
    strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1) if sharded else DDPStrategy()
    module = Sleepy(where, rank, sharded, steps=steps)
    measuring = [TimeBreakdown(2), Stragglers()] if measuring is None else measuring
    trainer = make_trainer([*extra, *measuring], OUT, steps=steps, every=every, strategy=strategy, devices=WORLD,
                           use_distributed_sampler=False, **kwargs)
    trainer.fit(module)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (module.embed, module.head)]
    assert hooks == ([2, 2] if sharded else [0, 0]), hooks  # those of FSDP2 stay
    rows = {t: row for t, row in trainer.logger.rows.items() if row.keys() - {"val/loss", "epoch"}}
    return trainer, rows

result = {}
for name, arguments in CASES.items():
    trainer, result[name] = run(**arguments)
    trainer.strategy.barrier()
report(trainer, **result)
"""
)

TWO = """
CASES = {
    "data": dict(where="data", extra=[Collective()]),
    "forward": dict(where="forward", extra=[Collective()]),
    "backward": dict(where="backward", extra=[Collective()]),
    "optimizer": dict(where="optimizer", extra=[Collective()]),
    "checkpoint": dict(extra=[StepCheckpoint(1, monitor=None)], plugins=[SlowIO()]),
    "sharded optimizer": dict(where="optimizer", sharded=True),
    "data of 0": dict(where="data", rank=0),
    "forward of 1": dict(where="forward", rank=1),
    "collective of 1": dict(where="collective", rank=1, extra=[Collective()]),
    "backward of 1": dict(where="backward", rank=1, accumulate_grad_batches=2, extra=[StopOnSignal()]),
    "sharded forward of 0": dict(where="forward", rank=0, sharded=True),
    "sharded data of 1": dict(where="data", rank=1, sharded=True),
    "pauses": dict(where="forward", rank=1, every=2, steps=8, limit_val_batches=1.0, measuring=[Stragglers()], extra=[
        Pause(), ValidateEvery(2), StepCheckpoint(5, monitor=None)]),
    "one profile": dict(measuring=[Profile(wait=2, steps=1, dirpath=str(OUT / "one"))]),
    "all profiles": dict(measuring=[Profile(wait=2, steps=1, dirpath=str(OUT / "all"), all_ranks=True)]),
}
"""


def start(cases, folder, ranks):
    head, tail = SCRIPT.split("result = {}")
    return run_ranks(head + cases + "result = {}" + tail, folder, ranks=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder):
    return start(TWO, folder, 2)


# ---- TimeBreakdown ----------------------------------------------------------------------------------------------

PARTS = ("data_stall", "forward", "backward", "communication", "optimizer", "checkpoint", "validation", "other")


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("data", ("data_stall", "data_stall")),
        ("forward", ("forward", "forward")),
        ("backward", ("backward", "backward")),
        ("optimizer", ("optimizer", "optimizer")),
        ("sharded optimizer", ("optimizer", "optimizer")),
        ("checkpoint", ("checkpoint", "checkpoint")),  # rank 1 waits in the barrier that ends a save
        ("data of 0", ("data_stall", "communication")),
        ("forward of 1", ("communication", "forward")),
        ("backward of 1", ("communication", "backward")),
        ("collective of 1", ("communication", "optimizer")),
        ("sharded forward of 0", ("forward", "communication")),
        ("sharded data of 1", ("communication", "data_stall")),
    ],
)
def test_what_takes_long_is_what_the_fractions_show_and_who_waits_communicates(two, case, parts):
    for each, part in zip(two, parts, strict=True):
        found = {part: each[case]["4"][f"time/{part}_fraction"] for part in PARTS}
        assert sum(found.values()) == pytest.approx(1, abs=1e-9)
        assert found[part] == max(found.values()) and found[part] > 0.4, found


# ---- Stragglers -------------------------------------------------------------------------------------------------


def check(row, *, straggler, ranks, naps=1):
    assert row["rank/straggler"] == straggler
    assert row["rank/step_time_max"] >= naps * NAP
    own_of_the_others = (row["rank/step_time_mean"] * ranks - row["rank/step_time_max"]) / (ranks - 1)
    assert 0 <= own_of_the_others < row["rank/step_time_max"] - naps * NAP / 2


@pytest.mark.parametrize(
    ("case", "straggler", "naps"),
    [
        ("data of 0", 0, 1),
        ("forward of 1", 1, 1),
        ("backward of 1", 1, 2),
        ("sharded forward of 0", 0, 1),
        ("sharded data of 1", 1, 1),
    ],
)
def test_the_slow_one_of_two_is_named_with_its_own_time(two, case, straggler, naps):
    rows = [{name: value for name, value in each[case]["4"].items() if name.startswith("rank/")} for each in two]
    assert rows[0] == rows[1] and set(rows[0]) == {"rank/step_time_max", "rank/step_time_mean", "rank/straggler"}
    check(rows[0], straggler=straggler, ranks=2, naps=naps)


def test_where_none_is_slower_the_mean_is_near_the_maximum(two):
    row = two[0]["forward"]["4"]
    assert NAP <= row["rank/step_time_mean"] <= row["rank/step_time_max"] < row["rank/step_time_mean"] + NAP / 2


def test_a_step_in_which_all_stood_still_is_not_measured(two):
    # Validation follows steps 2, 4 and 6; a save follows step 5. Logged: 2 (too early), 4, 6 (after the save) and 8.
    assert list(two[0]["pauses"]) == ["4", "8"]
    for row in two[0]["pauses"].values():
        check(row, straggler=1, ranks=2)
        assert row["rank/step_time_max"] < 3 * NAP  # its own sleep, not the two of a pause


# ---- Profile ----------------------------------------------------------------------------------------------------


def test_rank_zero_or_all_ranks_write_a_trace_and_the_collectives_are_in_it(two, folder):
    assert [path.name for path in (folder / "one").iterdir()] == ["rank0.3.pt.trace.json.gz"]
    assert sorted(path.name for path in (folder / "all").iterdir()) == [f"rank{r}.3.pt.trace.json.gz" for r in (0, 1)]
    for rank in (0, 1):
        with gzip.open(folder / "all" / f"rank{rank}.3.pt.trace.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"c10d::allreduce_", "ProfilerStep#3"} <= names and "ProfilerStep#4" not in names
