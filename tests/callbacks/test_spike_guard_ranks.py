"""SpikeGuard on two real processes (gloo): a spike on one rank makes both skip."""

import pytest
from foreign import run_ranks

SCRIPT = """
import math, warnings
from lit_llm.callbacks import *
from lightning.pytorch.strategies import ModelParallelStrategy
from lit_llm.optim import Lion, MuonAdamW
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "muon": lambda p: MuonAdamW(p, lr=1e-3, adamw_lr=1e-3),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
}
BAD = {(0, 1): math.nan, (14, 0): 1000.0, (15, 1): math.inf, (16, 1): math.nan, (16, 0): 1000.0}  # step, rank

class InOrder(FromGlobalStep):
    def __iter__(self):
        for i in range(self.trainer.global_step, self.steps):
            yield self.order[i] * 2 + self.trainer.global_rank

class Sick(Foreign):
    def __init__(self, order, bad, make):
        super().__init__(steps=len(order))
        self.order, self.bad, self.make = order, bad, make

    def training_step(self, batch, batch_idx):
        bad = self.bad.get((self.order[batch_idx], self.global_rank))
        loss = self.loss(batch)
        return loss if bad is None else loss * bad

    def configure_optimizers(self):
        return self.make(self.parameters())

    def train_dataloader(self):
        sampler = InOrder(self.trainer, self.steps)
        sampler.order = self.order
        return DataLoader(Batches(10**6), batch_size=None, sampler=sampler)

class Sharded(Sick):
    def __init__(self, *args):
        super().__init__(*args)
        self.head = nn.Linear(8, VOCAB, bias=False)

    def configure_model(self):
        if not isinstance(self.head.weight, DTensor):
            fully_shard(self.embed, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])

def everything(module):
    tensors = [*module.parameters()]
    for state in module.optimizers().optimizer.state_dict()["state"].values():
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach().view(torch.int32).tolist() for t in local]

def run(module, strategy):
    guard = SpikeGuard(window=16, min_steps=8)
    trainer = make_trainer([GradientNorm(0.5), guard], OUT, steps=module.steps, every=5, strategy=strategy, devices=2,
                           use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    said = [str(w.message) for w in caught if "SpikeGuard" in str(w.message)]
    return [everything(module), guard.state_dict(), trainer.logger.rows[15]["spike/skipped"]], said, trainer

def sharded():
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

results, said = {}, []
order = list(range(20))
well_order = [i for i in order if i not in {step for step, _ in BAD}]
for name, make in OPTIMIZERS.items():
    for kind, cls, strategy in (("ddp", Sick, lambda: "ddp"), ("fsdp", Sharded, sharded)):
        sick, warned, trainer = run(cls(order, BAD, make), strategy())
        said += warned
        results[f"{kind} {name}"] = [sick, run(cls(well_order, {}, make), strategy())[0]]
report(trainer, results=results, said=said)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("spikes"))


CASES = [f"{kind} {name}" for kind in ("ddp", "fsdp") for name in ("adamw fused", "sgd momentum", "muon", "lion")]


@pytest.mark.parametrize("case", CASES)
def test_a_spike_on_one_rank_skips_the_step_on_all(ranks, case):
    for each in ranks:
        (sick, sick_state, skipped), (well, well_state, _) = each["results"][case]
        assert sick == well
        assert sick_state["losses"] == well_state["losses"] and sick_state["norms"] == well_state["norms"]
        assert skipped == 1  # step 15; step 1 was in the row of step 1
    windows = [each["results"][case][0][1] for each in ranks]
    assert windows[0] == windows[1] and len(windows[0]["losses"]) == 16
    if case.startswith("ddp"):
        assert ranks[0]["results"][case][0] == ranks[1]["results"][case][0]


def test_only_rank_zero_warns(ranks):
    assert len(ranks[0]["said"]) == 3 * len(CASES) and not ranks[1]["said"]
