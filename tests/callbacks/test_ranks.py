"""The callbacks on two real processes (gloo)."""

import pytest
import torch
from foreign import BATCH, LENGTH, Foreign, fit, run_ranks

from lit_llm.callbacks import Cosine, GradientNorm

pytestmark = pytest.mark.slow

DDP = """
from lit_llm.callbacks import *

class Disagreeing(Foreign):
    # Logged without a reduction: best at step 2 for rank 0, at step 4 for rank 1.
    def validation_step(self, batch, batch_idx):
        ranks = [[1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 3.0, 2.0]]
        self.log("val/loss", ranks[self.global_rank][len(self.validated)])

    def generate_text(self, prompt, **kwargs):
        self.generated = getattr(self, "generated", 0) + 1
        return prompt

from lightning.pytorch.loggers import TensorBoardLogger

def run(steps, resume=None):
    checkpoint = StepCheckpoint(3, keep_last=1)
    module = Disagreeing(steps=steps)
    trainer = make_trainer(
        [ValidateEvery(2), Cosine(warmup_steps=2, total_steps=8), GradientNorm(0.5), Throughput(), checkpoint,
         TextSamples(["a"], 4), TrainingProgress()],
        OUT, steps=steps, strategy="ddp", devices=2, limit_val_batches=1.0, use_distributed_sampler=False,
        enable_progress_bar=True)
    trainer.loggers = [*trainer.loggers, TensorBoardLogger(OUT, name="", version="")]
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module, checkpoint

trainer, module, checkpoint = run(8)
folder = OUT / "checkpoints"
listing = sorted(p.name for p in folder.iterdir())
parameters = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
best, last = checkpoint.best_model_path, checkpoint.last_model_path
trainer.strategy.barrier()
_, resumed, _ = run(8, folder / "best.ckpt")
report(trainer, rows=trainer.logger.rows, seen=module.seen, listing=listing, best=best, last=last,
       score=checkpoint.best_model_score.item(), generated=module.generated, validated=module.validated,
       resumed=resumed.seen, parameters=parameters,
       resumed_parameters=torch.cat([p.detach().flatten() for p in resumed.parameters()]).tolist())
"""

FSDP = """
from lit_llm.callbacks import *
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

class Sharded(Foreign):
    def configure_model(self):
        if not isinstance(self.head.weight, DTensor):
            fully_shard(self.embed, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])

def run(steps, resume=None):
    module = Sharded(steps=steps)
    checkpoint = StepCheckpoint(3, keep_last=1, monitor=None)
    trainer = make_trainer([Cosine(total_steps=8), GradientNorm(0.5), Throughput(), checkpoint], OUT, steps=steps,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), devices=2,
        use_distributed_sampler=False)
    trainer.fit(module, ckpt_path=resume)
    assert isinstance(module.head.weight, DTensor)
    return trainer, module

trainer, module = run(5)
listing = sorted(p.name for p in (OUT / "checkpoints").iterdir())
trainer.strategy.barrier()
again, resumed = run(8, OUT / "checkpoints" / "step-00000005.ckpt")
report(trainer, rows={**trainer.logger.rows, **again.logger.rows}, listing=listing, seen=module.seen + resumed.seen,
       listing_after=sorted(p.name for p in (OUT / "checkpoints").iterdir()))
"""

TENSOR_PARALLEL = """
from lit_llm.callbacks import *
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

class Same(FromGlobalStep):
    def __iter__(self):  # both ranks are one data-parallel rank
        return iter(range(len(self)))

class Split(Foreign):
    # The head's weight is a DTensor, the embedding stays an ordinary tensor: the mixture that clip_grad_norm_ refuses.
    def configure_model(self):
        if not isinstance(self.head.weight, DTensor):
            self.head = nn.Linear(8, VOCAB + 1) if self.head.out_features % 2 else self.head
            torch.manual_seed(5)
            nn.init.normal_(self.head.weight); nn.init.normal_(self.head.bias)
            parallelize_module(self, self.device_mesh["tensor_parallel"],
                               {"head": ColwiseParallel(output_layouts=Replicate())})

    def train_dataloader(self):
        return DataLoader(Batches(10**6), batch_size=None, sampler=Same(self.trainer, self.steps))

module = Split(steps=4)
trainer = make_trainer([GradientNorm(0.5), Throughput()], OUT, steps=4, devices=2, use_distributed_sampler=False,
                       strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2))
trainer.fit(module)
assert isinstance(module.head.weight, DTensor) and not isinstance(module.embed.weight, DTensor)
report(trainer, rows=trainer.logger.rows, seen=module.seen)
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return run_ranks(DDP, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return run_ranks(FSDP, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same global batches on one process: two micro-batches a step."""
    callbacks = [Cosine(total_steps=8), GradientNorm(0.5)]
    return fit(callbacks, tmp_path_factory.mktemp("alone"), accumulate_grad_batches=2)


def norms(rows):
    return [rows[str(t)]["grad/norm"] for t in range(1, len(rows) + 1)]


def test_ddp_ranks_agree_on_norm_rate_and_count(ddp):
    keys = ("grad/norm", "grad/norm_clipped", "grad/clip_fraction", "lr", "lr/1", "progress/tokens")
    for step in range(1, 9):
        first, second = ({key: each["rows"][str(step)][key] for key in keys} for each in ddp)
        assert first == second
    assert ddp[0]["parameters"] == ddp[1]["parameters"]


def test_ddp_counts_the_tokens_of_all_ranks(ddp):
    assert [ddp[0]["rows"][str(t)]["progress/tokens"] for t in (1, 8)] == [t * 2 * BATCH * (LENGTH + 1) for t in (1, 8)]


def test_the_best_is_one_decision_of_rank_zero_though_ranks_disagree(ddp):
    for each in ddp:
        assert each["validated"] == [2, 4, 6, 8]
        assert each["listing"] == ["best.ckpt", "last.ckpt", "step-00000002.ckpt", "step-00000008.ckpt"]
        assert each["best"].endswith("step-00000002.ckpt") and each["last"].endswith("step-00000008.ckpt")
        assert each["score"] == 1.0


def test_ddp_resumes_bit_exactly_on_every_rank(ddp):
    for each in ddp:
        assert each["resumed"] == each["seen"][2:]
        assert each["resumed_parameters"] == each["parameters"]


def test_every_rank_generates_and_rank_zero_alone_prints(ddp):
    assert [each["generated"] for each in ddp] == [2, 2]
    lines = [line.split("  ")[0] for line in ddp[0]["stdout"].splitlines() if line.startswith("step")]
    assert lines == [f"step {t}/8" for t in [*range(1, 9), *range(3, 9)]]


def test_the_norm_over_shards_is_that_of_one_process(fsdp, alone):
    rows = alone[2]
    for each in fsdp:
        assert norms(each["rows"]) == pytest.approx([rows[t]["grad/norm"] for t in range(1, 9)], rel=1e-5)
    losses = [sum(pair) / 2 for pair in zip(*([loss for _, loss in each["seen"]] for each in fsdp), strict=True)]
    together = [loss for _, loss in alone[1].seen]
    assert losses == pytest.approx([sum(together[i : i + 2]) / 2 for i in range(0, 16, 2)], rel=1e-5)


def test_sharded_checkpoints_are_folders_rotated_and_linked_alike(fsdp):
    for each in fsdp:
        assert each["listing"] == ["last.ckpt", "step-00000005.ckpt"]
        assert each["listing_after"] == ["last.ckpt", "step-00000008.ckpt"]


def test_the_norm_of_split_and_ordinary_tensors_together_is_that_of_one_process(tmp_path):
    split = run_ranks(TENSOR_PARALLEL, tmp_path)
    module = Foreign(steps=4)
    module.head = torch.nn.Linear(8, 12)
    torch.manual_seed(5)
    torch.nn.init.normal_(module.head.weight)
    torch.nn.init.normal_(module.head.bias)
    _, _, rows = fit([GradientNorm(0.5)], tmp_path, module=module, steps=4)
    for each in split:
        assert norms(each["rows"]) == pytest.approx([rows[t]["grad/norm"] for t in range(1, 5)], rel=1e-5)
        assert [loss for _, loss in each["seen"]] == pytest.approx([loss for _, loss in module.seen], rel=1e-5)
        assert each["rows"]["4"]["progress/tokens"] == 4 * BATCH * (LENGTH + 1)  # one data-parallel rank, not two
