"""Data modules under a real Trainer: the batches and their order, also after interruptions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from recorder import TOKENS, SaveAt, T, expected_samples, fit, sample_numbers, write

from lit_llm.callbacks import BatchRamp
from lit_llm.core.errors import UserError
from lit_llm.data import Bytes
from lit_llm.training.outcome import reason_for_end

# ---- Training order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "workers"), [(None, 0), (2, 0), (3, 2)])
def test_samples_arrive_in_the_global_order_whatever_the_micro_batch_and_workers(tmp_path, shards, micro, workers):
    module, run = fit(tmp_path, shards(micro_batch_size=micro, num_workers=workers), max_steps=10)
    assert run.global_step == 10
    assert len(module.seen) == 10 * 6 // (micro or 6)
    assert {tuple(b["input_ids"].shape) for b in module.seen} == {(micro or 6, T)}
    assert sample_numbers(module.seen) == expected_samples(0, 60)  # two epochs of 25 and part of a third
    assert sorted(sample_numbers(module.seen)[25:50]) == list(range(25))
    assert run.accumulate_grad_batches == 6 // (micro or 6)
    assert run.current_epoch == 1  # one Lightning epoch
    assert len(run.train_dataloader) == len(module.seen)
    assert list(run.train_dataloader) == []  # no batches remain


def test_computing_the_order_in_chunks_changes_nothing(tmp_path, shards, monkeypatch):
    monkeypatch.setattr("lit_llm.data.batches._AHEAD", 13)  # two steps of six at a time
    module, _ = fit(tmp_path, shards(micro_batch_size=2), max_steps=7)
    assert sample_numbers(module.seen) == expected_samples(0, 42)


@pytest.mark.parametrize(
    ("limits", "steps", "end"),
    [
        ({"max_epochs": 2}, 9, "max_epochs=2"),  # 50 samples in batches of 6: 8.33
        ({"max_epochs": 2, "max_steps": 4}, 4, "max_steps=4"),
        # each of the three continues where the last one ended
        ({"max_epochs": 3, "limit_train_batches": 2}, 6, "max_epochs=3"),
    ],
)
def test_epochs_mean_passes_over_the_data(tmp_path, shards, limits, steps, end):
    module, run = fit(tmp_path, shards(), **limits)
    assert run.global_step == steps and reason_for_end(run) == f"reached trainer.{end}"
    assert sample_numbers(module.seen)[: steps * 6] == expected_samples(0, steps * 6)


@pytest.mark.parametrize(
    ("limits", "epoch", "steps"),  # a step has two micro-batches
    [
        ({"limit_train_batches": 3, "max_epochs": 3}, 4, 6),
        ({"limit_train_batches": 0.37, "max_steps": 7}, 6, 7),  # 5.18 of 14 micro-batches
        ({"fast_dev_run": 3}, 6, 3),
    ],
)
def test_each_step_reads_its_whole_batch_wherever_an_epoch_is_cut(tmp_path, shards, capsys, limits, epoch, steps):
    module, run = fit(tmp_path, shards(micro_batch_size=3), **limits)
    assert run.global_step == run.max_steps == steps and run.num_training_batches == epoch
    assert sample_numbers(module.seen) == expected_samples(0, 6 * steps)
    note = f"(--trainer.limit_train_batches {epoch})"
    assert (note in capsys.readouterr().err) == (limits.get("limit_train_batches") in (3, 0.37))


def test_a_validation_within_an_epoch_waits_for_the_end_of_its_step(tmp_path, shards):
    class Note(Callback):
        def on_validation_start(self, trainer, module):
            seen.append((trainer.global_step, trainer.fit_loop.total_batch_idx + 1))

    limits = {"limit_train_batches": 12, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    for interval in (3, 0.3, 4):  # 0.3 of 12 micro-batches are 3.6, so three
        seen = []
        fit(tmp_path, shards(micro_batch_size=3), max_steps=6, val_check_interval=interval, callbacks=[Note()], **limits)
        assert seen == [(2, 4), (4, 8), (6, 12)]


def test_a_limit_of_less_than_one_held_out_batch_is_one(tmp_path, shards, capsys):
    run = fit(tmp_path, shards(), max_steps=1, limit_val_batches=0.01)[1]
    assert run.num_val_batches == [1] and "(--trainer.limit_val_batches 1)" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [{"limit_train_batches": 4}, {"limit_train_batches": 0.5}, {"val_check_interval": 3}])
def test_a_limit_in_micro_batches_is_refused_where_a_ramp_changes_how_many_a_step_has(tmp_path, shards, limit):
    ramp = BatchRamp([(0, 3 * T), (6 * T, 6 * T)])
    with pytest.raises(UserError, match=rf"--trainer\.{next(iter(limit))} null"):
        fit(tmp_path, shards(micro_batch_size=3, block_size=T), max_steps=5, callbacks=[ramp], **limit)


def test_without_a_limit_the_loader_does_not_end_but_the_clock_does(tmp_path, shards):
    class StopAt(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 12

    module, run = fit(tmp_path, shards(), max_steps=-1, max_epochs=-1, callbacks=[StopAt()])
    assert run.global_step == 12
    assert sample_numbers(module.seen) == expected_samples(0, 72)


# ---- Resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "workers"), [((2, 2), 0), ((2, 3), 0), ((3, 1), 2)])
def test_a_resumed_run_reads_exactly_what_the_first_would_have(tmp_path, shards, micro, workers):
    path = tmp_path / "at4.ckpt"
    fit(tmp_path, shards(micro_batch_size=micro[0], num_workers=workers), max_steps=9, callbacks=[SaveAt(4, path)])
    data = shards(micro_batch_size=micro[1], num_workers=workers)
    module, run = fit(tmp_path, data, ckpt_path=path, max_steps=9)
    assert run.global_step == 9
    assert sample_numbers(module.seen) == expected_samples(24, 54)
    assert module.steps == [step for step in range(4, 9) for _ in range(6 // micro[1])]  # no window is cut short
    assert data.consumed_samples == 54
    assert run.current_epoch == 1
    assert run.fit_loop.epoch_loop.batch_progress.total.completed == 54 // micro[1]


@pytest.mark.parametrize(("limit", "epochs"), [(1.0, 1), (2, 3)])
@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_counts_its_epochs_as_the_first_would_have(tmp_path, shards, step, limit, epochs):
    path = tmp_path / "at.ckpt"
    fit(tmp_path, shards(), max_steps=5, limit_train_batches=limit, callbacks=[SaveAt(step, path)])
    progress = fit(tmp_path, shards(), ckpt_path=path, max_steps=5, limit_train_batches=limit)[1].fit_loop.epoch_progress
    for count in (progress.total, progress.current):
        assert (count.ready, count.started, count.processed, count.completed) == (epochs,) * 4


@pytest.mark.parametrize("inside", ["hook", "step"])
@pytest.mark.parametrize("batch", [0, 14])
def test_a_run_interrupted_inside_an_accumulation_window_repeats_the_whole_window(tmp_path, shards, batch, inside):
    path = tmp_path / "mid.ckpt"

    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, module, outputs, seen, batch_idx):
            if inside == "hook" and batch_idx == batch:
                trainer.save_checkpoint(path)

        def on_train_batch_start(self, trainer, module, seen, batch_idx):
            if inside == "step" and batch_idx == batch:
                trainer.save_checkpoint(path)

    fit(tmp_path, shards(micro_batch_size=2), max_steps=9, callbacks=[Interrupt()])
    first = (batch + (inside == "hook")) // 3  # steps so far
    module, run = fit(tmp_path, shards(micro_batch_size=2), ckpt_path=path, max_steps=9)
    assert sample_numbers(module.seen) == expected_samples(first * 6, 54)
    assert module.steps == [step for step in range(first, 9) for _ in range(3)]
    assert run.fit_loop.epoch_loop.batch_progress.total.completed == 27


def test_a_resume_of_a_resume_with_another_global_batch_skips_and_repeats_nothing(tmp_path, shards):
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    fit(tmp_path, shards(), max_steps=9, callbacks=[SaveAt(3, first)])  # 18 samples
    with pytest.warns(UserWarning, match="global_batch_size was 6 in the checkpoint and is 4"):
        fit(tmp_path, shards(global_batch_size=4), ckpt_path=first, max_steps=9, callbacks=[SaveAt(5, second)])  # + 8
    with pytest.warns(UserWarning, match="global_batch_size was 4 in the checkpoint and is 6"):
        module, _ = fit(tmp_path, shards(), ckpt_path=second, max_steps=7)
    assert sample_numbers(module.seen) == expected_samples(26, 38)


def test_the_state_is_plain_and_says_where_the_run_is(tmp_path, shards):
    path = tmp_path / "x.ckpt"
    data = shards()

    class AllHashed(Callback):
        def on_train_batch_start(self, trainer, *_):
            data._background.join()  # the hashes in a checkpoint are those known by then

    fit(tmp_path, data, max_steps=4, callbacks=[AllHashed(), SaveAt(3, path)])
    state = torch.load(path, weights_only=True)["TokenShards"]
    assert state == {
        "consumed_samples": 18,
        "global_step": 3,
        "fingerprint": data.opened.fingerprint(),
        "global_batch_size": 6,
        "batch_ramp": "none",
        "block_size": T,
        "seed": 3,
        "packing": "concatenate",
        "files": {str(file): described(file) for name in ("train", "val") for file in sorted(tmp_path.glob(f"{name}_*.bin"))},
    }


def described(file: Path) -> list[str]:
    status = file.stat()
    whole = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return [f"{status.st_size} {status.st_ctime_ns} {status.st_ino}", whole]


def test_resuming_on_other_data_is_not_silent(tmp_path, shards):
    path = tmp_path / "x.ckpt"
    fit(tmp_path, shards(), max_steps=3, callbacks=[SaveAt(2, path)])
    write(tmp_path, "train", np.arange(TOKENS) % 100)
    with pytest.warns(UserWarning, match=r"those of the checkpoint.*seed was 3 .*is 4; .*train_000001.bin has changed"):
        fit(tmp_path, shards(seed=4), ckpt_path=path, max_steps=3)


# ---- Held-out pass ----------------------------------------------------------------------------------------------


def held_out(loader):
    """Targets that count and the inputs they follow, in the order of the batches."""
    batches = list(loader)
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    inputs = torch.cat([batch["input_ids"].flatten() for batch in batches])
    return inputs[targets != -100], targets[targets != -100], batches


@pytest.mark.parametrize("tokens", [2, 9, 30])
@pytest.mark.parametrize("micro", [2, 6])
def test_every_held_out_token_but_the_first_is_predicted_once(tmp_path, shards, tokens, micro):
    write(tmp_path, "few", 500 + np.arange(tokens))
    data = shards(val=str(tmp_path / "few_*.bin"), micro_batch_size=micro)
    data.setup("validate")
    for _ in range(2):  # the order is fixed
        inputs, targets, batches = held_out(data.val_dataloader())
        assert targets.tolist() == list(range(501, 500 + tokens))
        assert inputs.tolist() == list(range(500, 499 + tokens))
        assert len({batch["targets"].shape for batch in batches}) == 1
        assert all(1 <= len(batch["targets"]) <= micro for batch in batches)
        assert all(batch["input_ids"].min() >= 0 for batch in batches)


def test_validation_sees_the_whole_set_and_testing_without_a_set_is_explained(tmp_path, shards):
    module, run = fit(tmp_path, shards(), max_steps=2, limit_val_batches=1.0, num_sanity_val_steps=0)
    assert sum(int((b["targets"] != -100).sum()) for b in module.validated) == 29
    with pytest.raises(ValueError, match=r"No test text: .*--data\.test"):
        data = shards()
        data.setup()
        data.test_dataloader()
    assert run.global_step == 2


# ---- Without a trainer, and mistakes ----------------------------------------------------------------------------


def test_it_works_without_a_trainer(shards):
    data = shards(micro_batch_size=3)
    data.setup("fit")
    assert (data.train_tokens, data.val_tokens, data.vocab_size) == (TOKENS, 30, 1000)
    assert (data.tokenizer, data.eos_id, data.token_bytes) == (None, None, None)
    assert data.every_target_counts
    batches = iter(data.train_dataloader())
    assert sample_numbers([next(batches) for _ in range(4)]) == expected_samples(0, 12)
    data.load_state_dict(data.state_dict() | {"consumed_samples": 600, "global_step": 100})
    assert data.consumed_samples == 600
    assert sample_numbers([next(iter(data.train_dataloader()))]) == expected_samples(600, 603)
    assert data.state_dict()["global_step"] == 100


def test_a_vocabulary_larger_than_the_tokenizer_has_ids_of_no_bytes(tmp_path, shards):
    write(tmp_path, "bytes", np.arange(257))
    write(tmp_path, "held", np.arange(257))
    files = {"train": str(tmp_path / "bytes_*.bin"), "val": str(tmp_path / "held_*.bin")}
    data = shards(**files, vocab_size=260, tokenizer=Bytes())
    data.setup()
    assert data.token_bytes.tolist() == [1] * 256 + [0] * 4
    data = shards(**files, vocab_size=None, tokenizer=Bytes())
    data.setup()
    assert data.vocab_size == 257
    assert shards(vocab_size=100, tokenizer=Bytes()).problems() == [
        "vocab_size 100 is smaller than the tokenizer's 257: remove --data.vocab_size."
    ]


def test_problems_of_shards_and_sizes_are_reported_together(tmp_path, shards):
    (tmp_path / "bad.bin").write_bytes(b"not a shard at all")
    write(tmp_path, "one", [5])
    data = shards(
        train=[str(tmp_path / "bad.bin"), str(tmp_path / "nothing_*.bin")],
        val=None,
        test=str(tmp_path / "one_*.bin"),
        global_batch_size=7,
        micro_batch_size=2,
        num_workers=0,
    )
    problems = data.problems(world_size=2)
    for words in (
        "use 6 or 8",
        "No val shards: give --data.val",
        "No non-empty file matches " + str(tmp_path / "nothing_*.bin"),
        "test shards hold a single token",
    ):
        assert sum(words in problem for problem in problems) == 1, words
    assert len(problems) == 4  # the broken shard is reported once the pattern is fixed
    assert any("bad.bin is not a token shard" in p for p in shards(train=str(tmp_path / "bad.bin")).problems())
    assert "give a pattern such as" in shards(train=str(tmp_path)).problems()[0]
    assert shards(block_size=0, num_workers=-1).problems() == [
        "data.block_size is 0, but must be at least 1 or null (--data.block_size)",
        "data.num_workers is -1, but must be at least 0 (--data.num_workers)",
    ]


def test_a_token_that_the_first_scan_did_not_see_is_never_served(shards):
    data = shards()
    data.setup()
    loader = data.train_dataloader()
    loader.dataset.vocab_size = 100  # as if the scan had missed the tokens from 100 on
    served = []
    with pytest.raises(ValueError, match=r"holds token id \d+ at position"):
        for batch in loader:
            served.append(int(batch["targets"].max()))
    assert all(token < 100 for token in served)
    with pytest.raises(ValueError, match=r"holds token id 100 at position 36"):
        loader.dataset[np.array([3, 12])]  # tokens 24..32 and 96..104


def test_accumulation_configured_by_hand_must_agree(tmp_path, shards):
    fit(tmp_path, shards(micro_batch_size=2), max_steps=1, accumulate_grad_batches=3)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches 2 contradicts .* give 3: remove"):
        fit(tmp_path, shards(micro_batch_size=2), max_steps=1, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="overfit_batches"):
        fit(tmp_path, shards(), max_steps=1, overfit_batches=1)
