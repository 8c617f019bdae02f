"""The callbacks on two real processes (gloo)."""

import pytest
from foreign import BATCH, LENGTH, run_ranks

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
report(trainer, rows=trainer.logger.rows, seen=module.seen, listing=listing, best=best, last=last,
       score=checkpoint.best_model_score.item(), generated=module.generated, validated=module.validated,
       parameters=parameters)
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return run_ranks(DDP, tmp_path_factory.mktemp("ddp"))


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


def test_every_rank_generates_and_rank_zero_alone_prints(ddp):
    assert [each["generated"] for each in ddp] == [2, 2]
    lines = [line.split("  ")[0] for line in ddp[0]["stdout"].splitlines() if line.startswith("step")]
    assert lines == [f"step {t}/8" for t in range(1, 9)]
