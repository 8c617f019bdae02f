from types import SimpleNamespace

import pytest
import torch
from asked import Letters, write
from foreign import BATCH, LENGTH, Batches, Foreign, fit, make_trainer
from lightning.pytorch.callbacks import Callback

from lit_llm.callbacks import StepCheckpoint, TaskScores, TextSamples, Throughput, ValidateEvery
from lit_llm.callbacks import throughput as module_under_test
from lit_llm.callbacks.device_peaks import peak_of, peaks_of
from lit_llm.callbacks.throughput import count_tokens

TOKENS = BATCH * (LENGTH + 1)  # of a micro-batch


class Clock:
    """Time passes only when a test advances it, so every figure is exact."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module_under_test, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Slow(Foreign):
    """A step takes `step` seconds, fetching a micro-batch takes `fetch`, validating a batch takes `val`."""

    def __init__(self, clock, step=1.0, fetch=0.0, val=0.0, **kwargs):
        super().__init__(**kwargs)
        self.clock, self.step_seconds, self.fetch, self.val = clock, step, fetch, val

    def training_step(self, batch, batch_idx):
        self.clock.now += self.step_seconds
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += self.val
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self):
        loader, clock, fetch = super().train_dataloader(), self.clock, self.fetch

        class SlowBatches(Batches):
            def __getitem__(self, i):
                clock.now += fetch
                return super().__getitem__(i)

        return torch.utils.data.DataLoader(SlowBatches(10**6), batch_size=None, sampler=loader.sampler)


def test_tokens_per_second_is_of_the_window_since_the_last_row_and_the_first_step_is_left_out(tmp_path, clock):
    rows = fit([Throughput()], tmp_path, module=Slow(clock, step=2.0), every=4)[2]
    assert list(rows) == [1, 4, 8]
    assert "throughput/tokens_per_second" not in rows[1]
    assert [rows[t]["throughput/tokens_per_second"] for t in (4, 8)] == [TOKENS / 2.0] * 2


def test_tokens_are_counted_over_accumulation(tmp_path, clock):
    rows = fit([Throughput()], tmp_path, module=Slow(clock, step=0.5), accumulate_grad_batches=3)[2]
    assert [rows[t]["progress/tokens"] for t in rows] == [t * 3 * TOKENS for t in range(1, 9)]
    assert [rows[t]["throughput/tokens_per_second"] for t in range(2, 9)] == pytest.approx([TOKENS / 0.5] * 7)


def test_a_slow_loader_is_what_the_data_fraction_shows(tmp_path, clock):
    rows = fit([Throughput()], tmp_path, module=Slow(clock, step=3.0, fetch=1.0), accumulate_grad_batches=2)[2]
    assert [rows[t]["time/data_fraction"] for t in range(2, 9)] == pytest.approx([0.25] * 7)


def test_a_slow_callback_is_not_data_time_but_is_training_time(tmp_path, clock):
    class Lazy(Callback):
        def on_train_batch_start(self, *args):
            clock.now += 2.0

        def on_train_batch_end(self, *args):
            clock.now += 4.0

    for callbacks in ([Lazy(), Throughput()], [Throughput(), Lazy()]):
        rows = fit(callbacks, tmp_path, module=Slow(clock, step=1.0, fetch=1.0))[2]
        assert [rows[t]["time/data_fraction"] for t in range(2, 9)] == pytest.approx([1 / 8] * 7)
        assert [rows[t]["throughput/tokens_per_second"] for t in range(2, 9)] == pytest.approx([TOKENS / 8] * 7)


def test_validation_saving_text_generation_and_tasks_are_left_out(tmp_path, clock, monkeypatch):
    class Writer(Slow):
        tokenizer, context_length = Letters(), 20

        def forward(self, ids):
            self.clock.now += 500.0
            return self.head(self.embed(ids))

        def generate_text(self, prompt, **kwargs):
            self.clock.now += 1000.0
            return prompt

    from lightning.pytorch.loggers import TensorBoardLogger

    saved = StepCheckpoint(3)
    samples = TextSamples(["a"], every_n_steps=2)
    tasks = TaskScores([write(tmp_path / "quiz.jsonl")], every_n_steps=2)
    module = Writer(clock, step=1.0, fetch=1.0, val=100.0)
    trainer = make_trainer(
        [ValidateEvery(3), samples, tasks, saved, Throughput()], tmp_path, limit_val_batches=1.0, num_sanity_val_steps=1
    )
    trainer.loggers = [*trainer.loggers, TensorBoardLogger(tmp_path)]
    dump = trainer._checkpoint_connector.dump_checkpoint

    def slow_dump(*args):
        clock.now += 10.0
        return dump(*args)

    monkeypatch.setattr(trainer._checkpoint_connector, "dump_checkpoint", slow_dump)
    trainer.fit(module)
    rows = trainer.logger.rows
    assert module.validated == [3, 6, 8] and clock.now > 6000
    assert [rows[t]["throughput/tokens_per_second"] for t in range(2, 9)] == pytest.approx([TOKENS / 2] * 7)
    assert [rows[t]["time/data_fraction"] for t in range(2, 9)] == pytest.approx([0.5] * 7)


def test_a_save_inside_a_validation_is_left_out_once(tmp_path, clock):
    class Save(Callback):
        def on_validation_end(self, trainer, pl_module):
            clock.now += 5.0
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            clock.now += 7.0

    module = Slow(clock, step=2.0, val=100.0)
    rows = fit([ValidateEvery(3), Save(), Throughput()], tmp_path, module=module, limit_val_batches=1.0)[2]
    assert [rows[t]["throughput/tokens_per_second"] for t in range(2, 9)] == pytest.approx([TOKENS / 2] * 7)


def test_the_token_count_continues_after_a_resume_and_the_first_window_is_not_measured(tmp_path, clock):
    first = make_trainer([Throughput()], tmp_path, steps=5)
    first.fit(Slow(clock, steps=5))
    first.save_checkpoint(tmp_path / "five.ckpt")
    rows = fit([Throughput()], tmp_path, module=Slow(clock), resume=tmp_path / "five.ckpt")[2]
    assert {t: r["progress/tokens"] for t, r in rows.items()} == {t: t * TOKENS for t in (6, 7, 8)}
    assert "throughput/tokens_per_second" not in rows[6]
    assert rows[7]["throughput/tokens_per_second"] == TOKENS / 1.0


def test_mfu_is_tokens_per_second_times_flops_per_token_over_the_peak(tmp_path, clock):
    module = Slow(clock, step=2.0)
    parameters = 11 * 8 + 8 * 11 + 11
    rows = fit([Throughput(peak_tflops=1e-9)], tmp_path, module=module)[2]
    assert rows[8]["throughput/mfu"] == pytest.approx(TOKENS / 2 * 6 * parameters / 1e3)


def test_mfu_names_its_convention_and_peak_once(tmp_path, clock, caplog):
    with caplog.at_level("INFO"):
        fit([Throughput(peak_tflops=2.5)], tmp_path, module=Slow(clock))
    said = [r.message for r in caplog.records if "throughput/mfu" in r.message]
    assert said == ["throughput/mfu: 1,122 FLOPs per token (6 x 187 parameters) over 1 x 2.5 TFLOP/s (cpu, 32-true, dense)."]


def test_unknown_hardware_has_no_mfu(tmp_path, clock):
    assert "throughput/mfu" not in fit([Throughput()], tmp_path, module=Slow(clock))[2][8]


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", "highest", 312),
        ("NVIDIA A100-SXM4-40GB", "32-true", "highest", 19.5),
        ("NVIDIA A100-SXM4-40GB", "32-true", "high", 156),
        ("NVIDIA H200", "bf16-mixed", "highest", 989),
        ("NVIDIA B200", "32-true", "high", None),
        ("NVIDIA H200", "64-true", "highest", None),
        ("NVIDIA H200 NVL", "bf16-mixed", "highest", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16-mixed", "highest", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", "highest", None),
        ("cpu", "32-true", "highest", None),
    ],
)
def test_the_peak_is_of_exactly_this_device_and_precision(name, precision, matmul, peak):
    assert peak_of(peaks_of(name), precision, matmul) == peak


def test_tokens_are_input_ids_or_else_the_first_integers():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    other = torch.zeros(5, dtype=torch.int32)
    assert count_tokens({"mask": other, "input_ids": ids}) == 6
    assert count_tokens([torch.zeros(9), (other, ids)]) == 5
    assert count_tokens({"x": torch.zeros(4, dtype=torch.bool), "y": {"z": ids}}) == 6
    with pytest.raises(ValueError, match="has no integer tensor"):
        count_tokens([torch.zeros(3)])


def test_peak_memory_covers_what_the_process_held(tmp_path):
    held = torch.ones(25_000_000)  # 0.1 GB
    row = fit([Throughput()], tmp_path)[2][8]
    assert held.sum() > 0
    assert 0.1 < row["memory/peak_gb"] < 100


def test_flops_per_token_are_asked_for_once_because_they_may_be_traced(tmp_path, clock):
    asked = []

    class Traced(Slow):
        @property
        def flops_per_token(self):
            asked.append(self)
            return 123.0

    rows = fit([Throughput(peak_tflops=1e-9)], tmp_path, module=Traced(clock, step=2.0))[2]
    assert len(asked) == 1 and rows[8]["throughput/mfu"] == pytest.approx(TOKENS / 2 * 123 / 1e3)
