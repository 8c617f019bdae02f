"""EMA on two real processes (gloo): shards of the average, and validation under FSDP2 that keeps weights whole."""

import pytest
import torch
from foreign import run_ranks

SCRIPT = """
from lit_llm.callbacks import *
from lit_llm.callbacks import _torch as internals
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

class Sharded(Foreign):
    def configure_model(self):
        if not isinstance(self.embed.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            for unit in (self.embed, self.head):  # 11 rows on 2 ranks: parts of different sizes
                fully_shard(unit, mesh=mesh, reshard_after_forward=False)

def run(cls, strategy, *callbacks):
    module = cls(steps=6)
    trainer = make_trainer([ValidateEvery(2), *callbacks], OUT, steps=6, strategy=strategy, devices=2, limit_val_batches=1.0,
                           use_distributed_sampler=False)
    trainer.fit(module)
    return module, trainer

def sharded():
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

results = {}
for name, cls, strategy in (("ddp", Foreign, lambda: "ddp"), ("fsdp2", Sharded, sharded)):
    plain, _ = run(cls, strategy())
    ema = EMA(0.5)
    module, trainer = run(cls, strategy(), ema)
    val = float(trainer.callback_metrics["val/loss"])
    average = ema.by_name(module)
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in average.items()}
    boxes = all(torch.equal(t.to_local(), whole[n][internals.local_box(t)])
                for n, t in average.items() if isinstance(t, DTensor))
    results[name] = dict(same=module.seen == plain.seen, val=val, boxes=boxes,
                         average={n: t.tolist() for n, t in whole.items()},
                         held=sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in average.values()),
                         after=trainer.validate(module, verbose=False)[0]["val/loss"])
report(trainer, results=results)
"""


@pytest.mark.slow
def test_two_ranks_average_what_one_process_would_and_train_as_without_it(tmp_path):
    ranks = run_ranks(SCRIPT, tmp_path)
    ddp = ranks[0]["results"]["ddp"]
    for each in ranks:
        for found in each["results"].values():
            assert found["same"] and found["boxes"]
            assert found["after"] == found["val"] == pytest.approx(ddp["val"], rel=1e-5)
            for name, values in found["average"].items():
                torch.testing.assert_close(torch.tensor(values), torch.tensor(ddp["average"][name]), rtol=1e-4, atol=1e-6)
    assert [each["results"]["ddp"]["held"] for each in ranks] == [11 * 8 + 8 * 11 + 11] * 2
    assert sum(each["results"]["fsdp2"]["held"] for each in ranks) == 11 * 8 + 8 * 11 + 11
