"""BatchRamp over our data: exact samples and gradients, after resumes and on two processes, against handwritten lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from lightning.pytorch import Callback, seed_everything
from ramp_run import BEFORE, RAMP, SIZES, Rows, weights
from recorder import SaveAt, T, expected_samples, fit, sample_numbers, trainer

from lit_llm.callbacks import BatchRamp, Cosine, GradientNorm, SpikeGuard, StepCheckpoint, StepSeed, Throughput, ValidateEvery
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel

SCRIPT = Path(__file__).with_name("ramp_script.py")


COUNTS = {  # micro-batches of the steps with 2, 8 and 12 samples, if a micro-batch has at most so many samples
    1: {2: 2, 8: 8, 12: 12},
    5: {2: 1, 8: 2, 12: 3},  # of 2, 4 and 4
    None: {2: 1, 8: 1, 12: 1},
}


@pytest.mark.parametrize(("micro", "workers"), [(1, 0), (5, 2), (None, 0)])
def test_samples_windows_and_position_of_every_step(tmp_path, shards, micro, workers):
    class Positions(Callback):
        def __init__(self):
            self.seen, self.accumulation = [], []

        def on_train_batch_end(self, trainer, *_):
            self.accumulation.append(trainer.accumulate_grad_batches)

        def on_before_optimizer_step(self, trainer, *_):
            self.seen.append((data.consumed_samples, data.step_samples))

    positions = Positions()
    data = shards(global_batch_size=12, micro_batch_size=micro, num_workers=workers)
    module, run = fit(tmp_path, data, max_steps=9, callbacks=[positions, BatchRamp(RAMP)])
    assert sample_numbers(module.seen) == expected_samples(0, 70)
    counts = [COUNTS[micro][size] for size in SIZES]
    assert module.steps == [step for step, count in enumerate(counts) for _ in range(count)]
    assert positions.accumulation == [count for count in counts for _ in range(count)]
    assert positions.seen == [(BEFORE[s], range(BEFORE[s], BEFORE[s + 1])) for s in range(9)]
    assert data.consumed_samples == 70 and run.current_epoch == 1 and len(run.train_dataloader) == sum(counts)
    assert list(run.train_dataloader) == []


@pytest.mark.parametrize("limits", [{"max_epochs": 2}])
def test_epochs_mean_passes_over_the_data(tmp_path, shards, limits):
    data = shards(global_batch_size=12, micro_batch_size=2)
    _, run = fit(tmp_path, data, callbacks=[BatchRamp(RAMP)], **limits)
    assert run.global_step == 8  # 46 samples are less than twice 25, 58 are not


@pytest.mark.parametrize(
    ("micro", "workers", "step"),
    [((1, 2), 0, 3), ((1, 2), 0, 6), ((2, 1), 2, 2)],
)
def test_a_resumed_run_reads_exactly_what_the_first_would_have(tmp_path, shards, step, micro, workers):
    path = tmp_path / "x.ckpt"
    first = shards(global_batch_size=12, micro_batch_size=micro[0])
    fit(tmp_path, first, max_steps=9, callbacks=[SaveAt(step, path), BatchRamp(RAMP)])
    data = shards(global_batch_size=12, micro_batch_size=micro[1], num_workers=workers)
    module, run = fit(tmp_path, data, ckpt_path=path, max_steps=9, callbacks=[BatchRamp(RAMP)])
    assert sample_numbers(module.seen) == expected_samples(BEFORE[step], 70)
    assert module.steps == [s for s in range(step, 9) for _ in range(SIZES[s] // micro[1])]
    assert data.consumed_samples == 70 and run.fit_loop.epoch_loop.batch_progress.total.completed == 70 // micro[1]


# ---- A model ----------------------------------------------------------------------------------------------------


class Gradients(Callback):
    """Record the weights before each step and its gradient before clipping."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = list(pl_module.model.named_parameters())
        self.steps.append(({n: p.detach().clone() for n, p in named}, {n: p.grad.clone() for n, p in named}))


def train(tmp_path, data, *extra, dropout=0.0, ckpt_path=None):
    """All the callbacks that count steps or micro-batches, with the ramp after half of them."""
    seed_everything(5)
    model = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, zero_init_projections=False, dropout=dropout)
    module = LanguageModel(model, lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    rows = Rows()
    checkpoint = StepCheckpoint(1, keep_last=20, monitor=None)
    callbacks = [*extra, Cosine(warmup_steps=2), GradientNorm(), ValidateEvery(4), BatchRamp(RAMP), Throughput(), SpikeGuard()]
    run = trainer(
        tmp_path, callbacks=[*callbacks, StepSeed(), checkpoint, rows], max_steps=9, log_every_n_steps=1,
        limit_val_batches=1.0, num_sanity_val_steps=0, enable_checkpointing=True,
    )  # fmt: skip
    run.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module, rows.rows


def blocks(numbers):
    """Inputs and targets (B, T) of these samples, by hand: token i of the stream is i."""
    tokens = torch.tensor(numbers)[:, None] * T + torch.arange(T + 1)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("counted", [True, False], ids=["every target counts", "counted"])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_gradient_is_that_of_the_steps_samples_in_one_micro_batch(tmp_path, shards, monkeypatch, micro, counted):
    data = shards(global_batch_size=12, micro_batch_size=micro)
    monkeypatch.setattr(type(data), "every_target_counts", counted)
    gradients = Gradients()
    module, rows = train(tmp_path, data, gradients)
    for step, (before, gradient) in enumerate(gradients.steps):
        inputs, targets = blocks(expected_samples(BEFORE[step], BEFORE[step + 1]))
        model = module.model
        model.load_state_dict(before)
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradient[name], p.grad, rtol=1e-4, atol=1e-7, msg=f"{name} in step {step + 1}")
        assert rows[step + 1]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert rows[step + 1]["progress/tokens"] == BEFORE[step + 1] * T


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_resumed_in_and_between_the_stages_it_is_the_same_run_bit_for_bit(tmp_path, shards, workers):
    def data(micro=2):
        return shards(global_batch_size=12, micro_batch_size=micro, num_workers=workers)

    module, whole = train(tmp_path, data(), dropout=0.2)
    assert len(whole) == 9
    for step in (2, 3, 4, 5, 7) if workers == 0 else (3, 7):
        path = tmp_path / "checkpoints" / f"step-{step:08d}.ckpt"
        resumed, rows = train(tmp_path / "again", data(), dropout=0.2, ckpt_path=path)
        assert rows == {t: whole[t] for t in range(step + 1, 10)}
        assert weights(resumed) == weights(module)


def test_skipped_steps_are_named_with_the_samples_of_their_size(tmp_path, shards):
    class Break(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step in (2, 3):
                next(pl_module.parameters()).grad.fill_(float("nan"))

    with pytest.warns(UserWarning, match="SpikeGuard") as caught:
        train(tmp_path, shards(global_batch_size=12, micro_batch_size=2), Break())
    said = [str(w.message) for w in caught if "SpikeGuard" in str(w.message)]
    assert len(said) == 2 and "global samples 4 to 5)" in said[0] and "global samples 6 to 13)" in said[1]


# ---- Two processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_make_the_run_of_one_and_either_continues_the_other(tmp_path, shards):
    one, rows = train(tmp_path / "one", shards(global_batch_size=12, micro_batch_size=1))
    ranks = run_ranks(SCRIPT, 2, tmp_path, tmp_path)
    for rank, each in enumerate(ranks):
        for t in range(1, 10):
            assert each["rows"][t] == pytest.approx(rows[t], rel=1e-5), (rank, t)
            half = expected_samples(BEFORE[t - 1], BEFORE[t])
            half = half[: len(half) // 2] if rank == 0 else half[len(half) // 2 :]
            assert each["samples"][t] == half
        for t in range(4, 10):  # from the file that one process wrote after step 3
            assert each["continued"][t] == pytest.approx(rows[t], rel=1e-5)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    for name, value in weights(one).items():
        got = torch.tensor(ranks[0]["weights"][name])
        torch.testing.assert_close(got, torch.tensor(value), rtol=1e-4, atol=1e-5)  # Adam divides by small numbers
    path = tmp_path / "two" / "checkpoints" / "step-00000005.ckpt"
    _, continued = train(tmp_path / "again", shards(global_batch_size=12, micro_batch_size=2), ckpt_path=path)
    for t in range(6, 10):
        assert continued[t] == pytest.approx(rows[t], rel=1e-5)


# ---- State and mistakes -----------------------------------------------------------------------------------------


def test_a_changed_ramp_is_noticed(tmp_path, shards):
    path = tmp_path / "x.ckpt"
    data = shards(global_batch_size=12, micro_batch_size=2)
    fit(tmp_path, data, max_steps=5, callbacks=[SaveAt(4, path), BatchRamp(RAMP)])
    saved = torch.load(path, weights_only=True)
    state = saved["TokenShards"]
    assert state["consumed_samples"] == 14 and state["batch_ramp"] == [[0, 16], [40, 64], [160, 96]]
    same, without, other = (shards(global_batch_size=12, micro_batch_size=2) for _ in range(3))
    same.find_ramp([BatchRamp(RAMP)])
    other.find_ramp([Throughput(), BatchRamp([(0, 12 * T)])])
    assert same.changes_since(saved) == []
    assert without.changes_since(saved) == [
        "batch_ramp.tokens_per_batch was [[0, 16], [40, 64], [160, 96]] in the checkpoint and is none"
        " (--accept_changes true continues with it)"
    ]
    assert other.changes_since(saved)[0].endswith("and is [[0, 96]] (--accept_changes true continues with it)")
    # once accepted, nothing is skipped or repeated: 14 samples were consumed, and steps have the new size
    with pytest.warns(
        UserWarning, match=r"tokens_per_batch was \[\[0, 16\], \[40, 64\], \[160, 96\]\] in the checkpoint and is none"
    ):
        module, _ = fit(tmp_path, without, ckpt_path=path, max_steps=6)
    assert sample_numbers(module.seen) == expected_samples(14, 38)


def test_all_problems_of_a_ramp_are_reported_together(shards):
    def problems(ramp, ranks=1, **arguments):
        data = shards(**({"global_batch_size": 12, "micro_batch_size": 2} | arguments))
        data.find_ramp([BatchRamp(ramp)])
        return data.problems(ranks)

    assert problems(RAMP) == []
    assert problems(RAMP, micro_batch_size=None) == problems(RAMP, micro_batch_size=5) == []
    assert problems([(0, 100), (200, 96)]) == [
        "batch_ramp: 100 tokens per batch is not a multiple of 8 tokens per sequence x 1 data-parallel rank = 8: use"
        " 96 or 104 tokens (--batch_ramp.tokens_per_batch)."
    ]
    assert "= 32: use 32 tokens " in problems(RAMP, ranks=4)[0]
    assert problems(RAMP, global_batch_size=24) == [
        "batch_ramp ends with 96 tokens per batch, but global_batch_size 24 x block_size 8 = 192: the two must be"
        " equal (--data.global_batch_size 12)."
    ]
    assert len(problems([(0, 100), (200, 96)], global_batch_size=7, val=None)) == 3
