import contextlib
import errno
import os
import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.checkpoint.snapshot import Snapshots, bytes_to_copy
from lit_llm.core import memory

Pair = namedtuple("Pair", "a b")


def state(value=1.0):
    """What Lightning saves, in small: tied weights, a view, optimizer state with numbers, plain values."""
    tied = torch.full((30, 20), value)
    weights = OrderedDict({"embed": tied, "head": tied.detach(), "row": tied[3], "half": torch.full((7,), value).bfloat16()})
    weights._metadata = {"": {"version": 1}}
    optimizer = {
        "state": {0: {"step": torch.tensor(value), "exp_avg": torch.full((30, 20), value)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    return {
        "global_step": int(value),
        "state_dict": weights,
        "optimizer_states": [optimizer],
        "callbacks": {"x": {"kept": ["a"], "pair": (1, torch.tensor([value]))}},
        "empty": torch.zeros(0, 3),
    }


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def blocked(monkeypatch):
    """Writing waits until the event is set."""
    go, write = threading.Event(), disk_format.write
    monkeypatch.setattr(disk_format, "write", lambda *args: (go.wait(20), write(*args))[1])
    yield go
    go.set()


@pytest.fixture
def background():
    io = AsyncFolderCheckpointIO()
    yield io
    io.teardown()


# -- host memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_copies_are_made_only_if_those_of_all_processes_take_at_most_half_of_the_free_memory(missing, tmp_path, monkeypatch):
    # fp32 weights of 30 × 20 that two names share, bf16 of 7, one step, one moment of 30 × 20, one value in a callback
    needed = 4 * 600 + 2 * 7 + 4 + 4 * 600 + 4
    assert bytes_to_copy(state()) == needed
    monkeypatch.setattr("lit_llm.checkpoint.io.free_host_bytes", lambda: 2 * 3 * needed - missing)
    io, threads = AsyncFolderCheckpointIO(processes_to_fit=3), []
    monkeypatch.setattr(disk_format, "write", lambda *args: threads.append(threading.current_thread()))
    with pytest.warns(match="--async_checkpoints true") if missing else contextlib.nullcontext():
        io.save_checkpoint(state(), tmp_path / "1.ckpt")
    io.save_checkpoint(state(), tmp_path / "2.ckpt")  # decided once
    io.teardown()
    assert [thread is threading.main_thread() for thread in threads] == [bool(missing)] * 2


def test_free_memory_is_that_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:  700 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS_OF_PROCESS", tmp_path / "groups")
    (tmp_path / "groups").write_text("0::/\n")
    assert memory.free_host_bytes() == 700 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_bytes() == 700 * 1024


# -- snapshots ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_equal_and_shares_only_what_the_original_shared():
    original = state()
    copied = Snapshots().take(original)
    assert same(original, copied)
    assert copied["state_dict"]._metadata == {"": {"version": 1}}
    assert not {t.data_ptr() for t in tensors(original) if t.numel()} & {t.data_ptr() for t in tensors(copied)}
    weights = copied["state_dict"]
    assert weights["embed"].data_ptr() == weights["head"].data_ptr()
    assert weights["row"].data_ptr() == weights["embed"].data_ptr() + 3 * 20 * 4
    original["callbacks"]["x"]["kept"].append("b")
    original["optimizer_states"][0]["param_groups"][0]["lr"] = 9
    assert same(copied, state())


def test_the_second_snapshot_is_in_the_memory_of_the_first():
    snapshots = Snapshots()
    places = [{t.data_ptr() for t in tensors(snapshots.take(state(value)))} for value in (1.0, 2.0, 3.0)]
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(3, 1).expand(3, 5),
        torch.tensor([[0, 2.0], [3, 0]]).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,  # the negative bit
        torch.nn.Parameter(torch.randn(3)),
        torch.tensor(5, dtype=torch.int64),
    ],
    ids=["transposed", "expanded", "sparse", "conjugate", "negative", "parameter", "scalar"],
)
def test_tensors_of_every_kind_are_copied_by_value(tensor):
    copied = Snapshots().take({"x": tensor})["x"]
    assert torch.equal(copied.to_dense(), tensor.to_dense())
    assert copied.requires_grad == tensor.requires_grad and copied.dtype == tensor.dtype


@pytest.mark.cuda
def test_from_a_gpu_the_copy_is_pinned_host_memory_and_of_the_moment_it_was_taken():
    weight = torch.zeros(1 << 24, device="cuda")
    snapshots = Snapshots()
    for value in (1.0, 2.0):
        weight.fill_(value)
        copied = snapshots.take({"w": weight})["w"]
        weight.fill_(-1)
        assert copied.device.type == "cpu" and copied.is_pinned() and bool((copied == value).all())


# -- saving -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", [FolderCheckpointIO, AsyncFolderCheckpointIO])
def test_what_is_saved_is_loaded_and_removed(tmp_path, io):
    io = io()
    io.save_checkpoint(state(3.0), tmp_path / "x" / "a.ckpt")
    assert io.finished(tmp_path / "x" / "a.ckpt", wait=True) is True
    assert same(io.load_checkpoint(tmp_path / "x" / "a.ckpt"), state(3.0))
    io.remove_checkpoint(tmp_path / "x" / "a.ckpt")
    io.teardown()
    assert os.listdir(tmp_path / "x") == []
    assert io.finished(tmp_path / "x" / "a.ckpt") is False


def test_what_training_changes_while_the_thread_writes_is_not_in_the_file(tmp_path, blocked, background):
    original = state(3.0)
    background.save_checkpoint(original, tmp_path / "a.ckpt")
    for tensor in tensors(original):
        tensor.fill_(-1)
    assert background.finished(tmp_path / "a.ckpt") is None
    assert not (tmp_path / "a.ckpt").exists()
    blocked.set()
    assert background.finished(tmp_path / "a.ckpt", wait=True) is True
    assert same(disk_format.read(tmp_path / "a.ckpt"), state(3.0))


def test_the_second_save_waits_for_the_first_and_spoils_nothing_of_it(tmp_path, blocked, background):
    background.save_checkpoint(state(1.0), tmp_path / "1.ckpt")
    threading.Timer(0.2, blocked.set).start()
    background.save_checkpoint(state(2.0), tmp_path / "2.ckpt")  # its memory is that of the first
    assert (tmp_path / "1.ckpt").exists()
    background.teardown()
    assert [disk_format.read(tmp_path / f"{i}.ckpt")["global_step"] for i in (1, 2)] == [1, 2]
    assert same(disk_format.read(tmp_path / "1.ckpt"), state(1.0))


def test_removals_and_loads_come_after_the_save_they_were_asked_for_after(tmp_path, blocked, background):
    background.save_checkpoint(state(1.0), tmp_path / "1.ckpt")
    background.remove_checkpoint(tmp_path / "1.ckpt")
    blocked.set()
    background.teardown()
    assert os.listdir(tmp_path) == []
    background.save_checkpoint(state(2.0), tmp_path / "2.ckpt")
    assert background.load_checkpoint(tmp_path / "2.ckpt")["global_step"] == 2


# -- when it fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", [FolderCheckpointIO, AsyncFolderCheckpointIO])
def test_a_disk_that_refuses_is_one_warning_and_the_older_one_stays(tmp_path, io, monkeypatch):
    io = io()
    io.save_checkpoint(state(1.0), tmp_path / "1.ckpt")
    assert io.finished(tmp_path / "1.ckpt", wait=True)

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.warns(UserWarning) as caught:
        patch.setattr(os, "fsync", full)
        for name in ("1.ckpt", "2.ckpt"):
            io.save_checkpoint(state(2.0), tmp_path / name)
            assert io.finished(tmp_path / name, wait=True) is False
    ours = [str(w.message) for w in caught if "could not be saved" in str(w.message)]
    assert len(ours) == 2 and "1.ckpt could not be saved: No space left on device. Training goes on" in ours[0]
    assert os.listdir(tmp_path) == ["1.ckpt"] and disk_format.read(tmp_path / "1.ckpt")["global_step"] == 1
    io.save_checkpoint(state(3.0), tmp_path / "2.ckpt")  # there is room again
    assert io.finished(tmp_path / "2.ckpt", wait=True) is True
    io.teardown()


@pytest.mark.parametrize("when", ["finished", "save", "teardown"])
def test_an_error_of_ours_in_the_thread_reaches_the_main_thread_once(tmp_path, background, when):
    background.save_checkpoint({"global_step": 1, "bad": threading.Barrier}, tmp_path / "1.ckpt")  # a class: code, not data
    next_call = {
        "finished": lambda: background.finished(tmp_path / "1.ckpt", wait=True),
        "save": lambda: background.save_checkpoint(state(2.0), tmp_path / "2.ckpt"),
        "teardown": background.teardown,
    }[when]
    with pytest.raises(ValueError, match=r"holds threading\.Barrier where only tensors and plain values"):
        next_call()
    assert background.finished(tmp_path / "1.ckpt", wait=True) is False
    assert os.listdir(tmp_path) == []


def test_a_damaged_one_is_not_loaded_and_code_never(tmp_path):
    io = FolderCheckpointIO()
    io.save_checkpoint(state(1.0), tmp_path / "1.ckpt")
    with open(tmp_path / "1.ckpt" / "checkpoint.pt", "r+b") as file:
        file.seek(1500)
        file.write(b"\x55")
    with pytest.raises(ValueError, match=r"1\.ckpt is damaged"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    TorchCheckpointIO().save_checkpoint({"state_dict": {}, "code": threading.Barrier}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="without running code"):
        io.load_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
