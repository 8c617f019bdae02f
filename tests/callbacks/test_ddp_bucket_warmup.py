"""DDPBucketWarmup: on more than two ranks, the first step after a resume rounds like in the uninterrupted run."""

import pytest
from foreign import run_ranks

SCRIPT = """
from lit_llm.callbacks import *
from lightning.pytorch.strategies import DDPStrategy

class Deep(Foreign):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def loss(self, batch):
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def run(callbacks, folder, resume=None, **options):
    checkpoint = StepCheckpoint(2, keep_last=9, monitor=None, dirpath=str(OUT / folder))
    module = Deep(steps=6)
    trainer = make_trainer([*callbacks, checkpoint], OUT, steps=6, strategy=DDPStrategy(**options), devices=WORLD,
                           use_distributed_sampler=False)
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    trainer.strategy.barrier()
    return trainer, [p.detach().view(torch.int32).tolist() for p in module.parameters()]

results = {}
for name, callbacks, options in (("without", [], {}), ("with", [DDPBucketWarmup()], {}),
                                 ("views", [DDPBucketWarmup()], {"gradient_as_bucket_view": True}),
                                 ("unused", [DDPBucketWarmup()], {"find_unused_parameters": True})):
    straight = run(callbacks, name, **options)[1]
    trainer, resumed = run(callbacks, name + "-resumed", OUT / name / "step-00000002.ckpt", **options)
    results[name] = straight == resumed
report(trainer, results=results)
"""


@pytest.mark.slow
def test_a_resumed_run_on_three_ranks_equals_the_uninterrupted_run_bit_for_bit(tmp_path):
    for each in run_ranks(SCRIPT, tmp_path, ranks=3):
        assert each["results"] == {"without": False, "with": True, "views": True, "unused": True}
