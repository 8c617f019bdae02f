"""BatchRamp with a LightningModule independent of lit_llm. With TokenDataModule: tests/data/test_ramped_order.py."""

import random

import pytest
import torch
from foreign import BATCH, LENGTH, Batches, Foreign, FromGlobalStep, fit, make_trainer
from torch.utils.data import DataLoader

from lit_llm.callbacks import BatchRamp, StepCheckpoint, Throughput, ValidateEvery

MICRO = BATCH * (LENGTH + 1)  # tokens
RAMP = [(0, MICRO), (3 * MICRO, 3 * MICRO), (8 * MICRO, 2 * MICRO)]
WINDOWS = [1, 1, 1, 3, 3, 2, 2, 2]  # micro-batches of each step, by hand: 3 are seen after three, 9 after five steps
FIRST = [0, 1, 2, 3, 6, 9, 11, 13]  # number of each step's first micro-batch


class FromRamp(FromGlobalStep):
    """Begins at the micro-batch given in the docstring of BatchRamp."""

    def __len__(self):
        return self.ramp.tokens_before(self.steps) // (MICRO * self.trainer.world_size)

    def __iter__(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        for i in range(self.ramp.tokens_before(self.trainer.global_step) // (MICRO * world), len(self)):
            yield i * world + rank


class Ramped(Foreign):
    micro_batch_tokens = MICRO

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.windows, self.gradients = [], []

    def train_dataloader(self):
        sampler = FromRamp(self.trainer, self.steps)
        sampler.ramp = next(c for c in self.trainer.callbacks if isinstance(c, BatchRamp))
        return DataLoader(Batches(10**6), batch_size=None, sampler=sampler)

    def training_step(self, batch, batch_idx):
        self.windows.append((self.trainer.global_step, self.trainer.accumulate_grad_batches))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        before = [p.detach().clone() for p in self.parameters()]
        self.gradients.append((before, [p.grad.clone() for p in self.parameters()]))


@pytest.mark.parametrize("seed", range(20))
def test_the_functions_are_those_of_a_walk_through_the_steps(seed):
    draw = random.Random(seed)
    thresholds = [0, *sorted(draw.sample(range(1, 400), draw.randrange(5)))]
    pairs = [(threshold, draw.randrange(1, 60)) for threshold in thresholds]
    ramp, consumed = BatchRamp(pairs), 0
    for step in range(100):
        size = [size for threshold, size in pairs if threshold <= consumed][-1]
        assert (ramp.tokens_before(step), ramp.batch_tokens(step)) == (consumed, size)
        for tokens in range(consumed + 1, consumed + size + 1):
            assert ramp.steps_for(tokens) == step + 1
        consumed += size
    assert ramp.steps_for(0) == 0


@pytest.mark.parametrize("ramp_first", [True, False])
def test_windows_gradients_and_tokens_with_a_custom_loader(tmp_path, ramp_first):
    callbacks = [Throughput(), ValidateEvery(3), StepCheckpoint(4, monitor=None)]
    callbacks = [BatchRamp(RAMP), *callbacks] if ramp_first else [*callbacks, BatchRamp(RAMP)]
    trainer, module, rows = fit(callbacks, tmp_path, module=Ramped(), limit_val_batches=1.0)
    assert module.windows == [(step, size) for step, size in enumerate(WINDOWS) for _ in range(size)]
    assert [rows[t]["progress/tokens"] for t in range(1, 9)] == [sum(WINDOWS[:t]) * MICRO for t in range(1, 9)]
    assert module.validated == [3, 6, 8]
    files = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert files == ["step-00000004.ckpt", "step-00000008.ckpt"]
    # each gradient equals that of the step's samples as one micro-batch
    for step, (before, gradient) in enumerate(module.gradients):
        batch = torch.cat([Batches(99)[FIRST[step] + i] for i in range(WINDOWS[step])])
        alone = Foreign()
        with torch.no_grad():
            for p, value in zip(alone.parameters(), before, strict=True):
                p.copy_(value)
        alone.loss(batch).backward()
        for p, got in zip(alone.parameters(), gradient, strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-7)
    assert trainer.accumulate_grad_batches == 1
    assert "_accumulated_batches_reached" not in vars(trainer.fit_loop.epoch_loop)
    assert "_make_zero_grad_fn" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


def test_the_size_of_a_micro_batch_may_depend_on_the_step(tmp_path):
    """Steps of 6 sequences in micro-batches of 2, then of 9 sequences in micro-batches of 3."""

    class Sized(Ramped):
        def micro_batch_tokens(self, step):
            return (2 if step < 2 else 3) * (LENGTH + 1)

        def train_dataloader(self):
            rows = Batches(99)
            return DataLoader([rows[i][:n] for i, n in enumerate([2] * 6 + [3] * 9)], batch_size=None)

    sequence = LENGTH + 1
    module = fit([BatchRamp([(0, 6 * sequence), (12 * sequence, 9 * sequence)])], tmp_path, module=Sized(), steps=5)[1]
    assert module.windows == [(step, 3) for step in range(5) for _ in range(3)]
    with pytest.raises(ValueError, match=r"10 tokens per batch is not a multiple of \d+ tokens per micro-batch"):
        fit([BatchRamp([(0, 6 * sequence), (12 * sequence, 10)])], tmp_path, module=Sized(), steps=5)


def parameters(module):
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("step", range(1, 8))
def test_a_resume_makes_the_same_steps(tmp_path, step):
    def run(resume=None):
        saves = StepCheckpoint(1, keep_last=99, monitor=None)
        return fit([BatchRamp(RAMP), saves], tmp_path, module=Ramped(), resume=resume)[1]

    whole = run()
    rest = run(tmp_path / "checkpoints" / f"step-{step:08d}.ckpt")
    assert rest.seen == whole.seen[FIRST[step] :] and parameters(rest) == parameters(whole)
    assert rest.windows == whole.windows[FIRST[step] :]


def test_where_an_epoch_ends_within_a_step_the_next_step_is_whole_again(tmp_path):
    class Short(Ramped):
        def train_dataloader(self):
            return DataLoader(Batches(5), batch_size=None)

    module = fit([BatchRamp(RAMP)], tmp_path, module=Short(), steps=6)[1]
    steps = [step for step, _ in module.windows]
    assert steps == [0, 1, 2, 3, 3, *[4, 4, 4], *[5, 5]]  # step 3 has two of its three micro-batches, because the epoch ended


def test_what_cannot_be_a_ramp_is_refused():
    for pairs, said in (
        ([], "its first pair must begin at 0 tokens"),
        ([(5, 1)], "its first pair must begin at 0 tokens"),
        ([(0, 1), (9, 2), (9, 3)], "has threshold 9 after 9"),
        ([(0, 0)], "a batch of 0 tokens"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            BatchRamp(pairs)
        assert "BatchRamp(tokens_per_batch)" in str(caught.value)


def test_sizes_that_do_not_divide_are_reported_with_the_nearest():
    ramp = BatchRamp([(0, 3), (5, 12), (9, 17), (40, 3)])
    assert ramp.size_problems(lambda step: 4, 1) == [
        "batch_ramp: 3 tokens per batch is not a multiple of 4 tokens per micro-batch x 1 data-parallel rank = 4: use 4"
        " tokens (BatchRamp(tokens_per_batch)).",
        "batch_ramp: 17 tokens per batch is not a multiple of 4 tokens per micro-batch x 1 data-parallel rank = 4: use 16"
        " or 20 tokens (BatchRamp(tokens_per_batch)).",
    ]
    assert "2 data-parallel ranks = 8" in BatchRamp([(0, 12)]).size_problems(lambda step: 4, 2)[0]


def test_what_the_trainer_or_the_module_decides_otherwise_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a multiple of 12"):
        fit([BatchRamp([(0, 13)])], tmp_path, module=Ramped())
    with pytest.raises(ValueError, match=r"needs an attribute micro_batch_tokens.*add it to the data module or to Foreign"):
        fit([BatchRamp(RAMP)], tmp_path)
    with pytest.raises(ValueError, match=r"remove Trainer\(accumulate_grad_batches\)"):
        fit([BatchRamp(RAMP)], tmp_path, module=Ramped(), accumulate_grad_batches=2)
    module = Ramped()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="uses manual optimization"):
        fit([BatchRamp(RAMP)], tmp_path, module=module)
    trainer = make_trainer([], tmp_path)
    trainer.strategy.__class__ = type("Own", (type(trainer.strategy),), {"handles_gradient_accumulation": True})
    assert "Own handles gradient accumulation itself" in BatchRamp.trainer_problems(trainer)[0]


def test_a_whole_number_in_scientific_notation_is_one_and_a_fraction_is_refused():
    ramp = BatchRamp([(0, 64.0), (1e7, 128)])
    assert ramp.tokens_per_batch == [(0, 64), (10_000_000, 128)] and ramp.steps_for(10_000_000) == 156_250
    assert all(type(number) is int for pair in ramp.tokens_per_batch for number in pair)
    for wrong in ([(0, 64.5)], [(0, 64), (float("nan"), 128)], [(0, 64), (float("inf"), 128)]):
        with pytest.raises(ValueError, match=r"BatchRamp\(tokens_per_batch\) is .*whole number"):
            BatchRamp(wrong)
