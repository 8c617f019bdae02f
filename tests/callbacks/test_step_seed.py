"""StepSeed: random draws depend only on the position."""

import random

import numpy as np
import torch
from foreign import Foreign, make_trainer
from torch import nn

from lit_llm.callbacks import StepSeed


class Dropping(Foreign):
    """Applies dropout, and records a draw of every generator at each micro-batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = nn.Dropout(0.5)
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        torch.rand(3), random.random(), np.random.rand()


# blake2b of "7 STEP MICRO_BATCH 0", cut in three.
PINNED = {
    (0, 0): (1267706321943157611, 7913465803403137034, 1421890108),
    (0, 1): (1572492978882338808, 149431334910763737, 2566496490),
    (1, 0): (191552950712135879, 11870480546473622082, 3139271797),
    (1, 1): (10130049724658205594, 6592554032485412222, 3035323269),
}


def run(tmp_path, callbacks, *, steps=6, resume=None, accumulate=2, module=None, **kwargs):
    module = module or Dropping(steps=steps)
    trainer = make_trainer(callbacks, tmp_path, steps=steps, accumulate_grad_batches=accumulate, **kwargs)
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module, [p.tolist() for p in module.parameters()]


def interrupted(tmp_path, callbacks):
    run(tmp_path, callbacks, steps=3)[0].save_checkpoint(tmp_path / "3.ckpt")
    return run(tmp_path, callbacks, resume=tmp_path / "3.ckpt")


def test_a_dropout_run_continues_bit_for_bit(tmp_path):
    _, whole, parameters = run(tmp_path, [StepSeed()])
    _, resumed, resumed_parameters = interrupted(tmp_path, [StepSeed()])
    assert resumed.seen == whole.seen[6:] and resumed.drawn == whole.drawn[6:]
    assert resumed_parameters == parameters


def test_what_validation_draws_changes_nothing(tmp_path):
    quiet = run(tmp_path, [StepSeed()])[1]
    disturbed = run(tmp_path, [StepSeed()], limit_val_batches=2, val_check_interval=2, num_sanity_val_steps=2)[1]
    assert disturbed.validated and disturbed.drawn == quiet.drawn and disturbed.seen == quiet.seen


def test_every_micro_batch_generator_and_seed_draws_its_own(tmp_path):
    drawn = {seed: run(tmp_path, [StepSeed(seed)])[1].drawn for seed in (0, 1)}
    numbers = [number for seed in drawn for micro_batch in drawn[seed] for number in micro_batch]
    assert len(set(numbers)) == len(numbers) == 2 * 12 * 3


def test_the_position_is_the_step_and_the_micro_batch_in_it(tmp_path):
    """The numbers are pinned, because a run must continue with a later version of StepSeed."""
    drawn = run(tmp_path, [StepSeed(7)], steps=2)[1].drawn
    expected = []
    for step in range(2):
        for micro_batch in range(2):
            seeds = PINNED[step, micro_batch]
            expected.append(
                (
                    torch.rand((), generator=torch.Generator().manual_seed(seeds[0])).item(),
                    random.Random(seeds[1]).random(),
                    float(np.random.RandomState(seeds[2]).rand()),
                )
            )
    assert drawn == expected
