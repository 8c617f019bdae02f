import errno
import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from saved import checkpoint, flip, names, save, step_path

from lit_llm.checkpoint import disk_format

# -- what is written ----------------------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written_and_shared_tensors_are_stored_once(tmp_path):
    content = checkpoint(7, numbers=[1, 2.5, (True, None)], text="ü")
    disk_format.write(content, tmp_path / "deep" / "er" / "step-00000007.ckpt")
    back = disk_format.read(tmp_path / "deep" / "er" / "step-00000007.ckpt")
    assert back.keys() == content.keys()
    assert back["numbers"] == content["numbers"] and back["text"] == "ü" and back["global_step"] == 7
    assert torch.equal(back["state_dict"]["a"], content["state_dict"]["a"])
    assert back["state_dict"]["a"].data_ptr() == back["state_dict"]["b"].data_ptr()
    assert (tmp_path / "deep/er/step-00000007.ckpt/checkpoint.pt").stat().st_size < 2 * 50 * 40 * 4


def test_the_manifest_has_step_tokens_versions_and_files(tmp_path):
    # Only the entry `tokens` counts, whatever the others look like.
    content = checkpoint(7, tokens=224 * 128, Other={"consumed_samples": 1, "block_size": 2})
    disk_format.write(content, tmp_path / "a.ckpt")
    manifest = disk_format.read_manifest(tmp_path / "a.ckpt")
    assert manifest["step"] == 7 and manifest["tokens"] == 224 * 128
    assert manifest["versions"]["torch"] == torch.__version__ and manifest["versions"].keys() >= {
        "lit_llm",
        "lightning",
        "python",
    }
    data = tmp_path / "a.ckpt" / "checkpoint.pt"
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert manifest["files"] == {"checkpoint.pt": {"bytes": data.stat().st_size, "sha256": digest}}
    disk_format.write(checkpoint(7), tmp_path / "b.ckpt")
    assert disk_format.read_manifest(tmp_path / "b.ckpt")["tokens"] is None


def test_the_files_and_the_folders_above_are_fsynced_before_and_after_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"{Path(a).name} -> {Path(b).name}"), rename(a, b)))
    disk_format.write(checkpoint(1), tmp_path / "new" / "a.ckpt")
    partial = tmp_path / "new" / ".a.ckpt.partial"
    expected = [
        tmp_path,
        partial / "checkpoint.pt",
        partial / "manifest.json",
        partial,
        ".a.ckpt.partial -> a.ckpt",
        tmp_path / "new",
    ]
    assert events == [str(event) for event in expected]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    disk_format.write(checkpoint(1, what="first"), tmp_path / "a.ckpt")
    disk_format.write(checkpoint(1, what="second"), tmp_path / "a.ckpt")
    assert disk_format.read(tmp_path / "a.ckpt")["what"] == "second"
    assert names(tmp_path) == ["a.ckpt"]


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(
        ValueError, match=r"a\.ckpt cannot be loaded without running code from it: it holds pathlib\.\w*Path where"
    ):
        disk_format.write(checkpoint(1, hyper_parameters={"path": Path("x")}), tmp_path / "a.ckpt")
    assert names(tmp_path) == []


def test_removing_deletes_folders_files_and_links_alone_and_nothing_twice(tmp_path):
    save(tmp_path, 1, 2)
    torch.save({}, tmp_path / "file.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step-00000002.ckpt")
    for name in ("step-00000001.ckpt", "file.ckpt", "last.ckpt", "never.ckpt"):
        disk_format.remove(tmp_path / name)
    assert names(tmp_path) == ["step-00000002.ckpt"]


def test_leftovers_of_killed_processes_are_cleared_and_those_of_others_are_not(tmp_path):
    for name in (".step-00000001.ckpt.partial", ".step-00000002.ckpt.removed", ".rsync.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").write_text("half")
    save(tmp_path, 9)
    assert names(tmp_path) == [".rsync.partial", "step-00000009.ckpt"]


def test_killed_while_replacing_the_old_one_is_read_and_comes_back_at_the_next_save(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "last.ckpt").symlink_to("step-00000005.ckpt")
    os.rename(step_path(tmp_path, 5), tmp_path / ".step-00000005.ckpt.replaced")
    for path in (step_path(tmp_path, 5), tmp_path / "last.ckpt"):
        assert disk_format.damage(path) is None
        assert disk_format.read(path)["global_step"] == disk_format.read_manifest(path)["step"] == 5
    best, damaged = disk_format.newest_good(tmp_path)
    assert disk_format.read(best)["global_step"] == 5 and not damaged
    save(tmp_path, 6)
    assert names(tmp_path) == ["last.ckpt", "step-00000005.ckpt", "step-00000006.ckpt"]


# -- a disk that refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["mkdir", "fsync", "rename"])
def test_any_operation_that_fails_leaves_the_old_one_in_its_place(tmp_path, monkeypatch, operation):
    save(tmp_path, 1)
    real = getattr(os, operation)
    for fail_at in range(20):
        count = 0

        def failing(*args, **kwargs):
            nonlocal count
            count += 1
            if count == fail_at + 1:  # noqa: B023  # called in this turn of the loop
                raise OSError(errno.EIO, "no")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            try:
                disk_format.write(checkpoint(1), step_path(tmp_path, 1))
            except OSError as error:
                assert error.errno == errno.EIO
        best, damaged = disk_format.newest_good(tmp_path)
        assert best == step_path(tmp_path, 1) and not damaged
        if count <= fail_at:
            break
    assert fail_at > 0
    assert names(tmp_path) == ["step-00000001.ckpt"]


# -- damage -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1, 2)
    return folder


@pytest.fixture
def pair(two, tmp_path):
    """Steps 1 and 2, to be damaged."""
    shutil.copytree(two, tmp_path / "run")
    return tmp_path / "run"


def is_passed_over(folder, what):
    newest = step_path(folder, 2)
    best, damaged = disk_format.newest_good(folder)
    assert best == step_path(folder, 1)
    assert len(damaged) == 1 and "step-00000002.ckpt" in damaged[0] and what in damaged[0]
    assert disk_format.damage(newest) == damaged[0]
    with pytest.raises(ValueError) as raised:
        disk_format.read(newest)
    assert str(raised.value) == damaged[0]
    return True


@pytest.mark.parametrize("file", ["checkpoint.pt", "manifest.json"])
def test_one_flipped_bit_anywhere_is_found_and_the_one_before_is_used(pair, file):
    path = step_path(pair, 2) / file
    good = path.read_bytes()
    places = random.Random(5).sample(range(len(good) * 8), 20)
    for bit in [0, *places, len(good) * 8 - 1]:
        flip(path, bit)
        assert is_passed_over(pair, "changed since it was written" if file == "manifest.json" else "changed since")
        path.write_bytes(good)
    assert disk_format.newest_good(pair) == (step_path(pair, 2), [])


@pytest.mark.parametrize("file", ["checkpoint.pt", "manifest.json"])
def test_a_truncated_file_is_found_wherever_it_ends(pair, file):
    path = step_path(pair, 2) / file
    good = path.read_bytes()
    for length in [0, 1, *random.Random(6).sample(range(len(good)), 20), len(good) - 1]:
        path.write_bytes(good[:length])
        assert is_passed_over(pair, f"has {length} bytes" if file == "checkpoint.pt" else "changed since")
        path.write_bytes(good)


def test_unverified_reading_is_for_those_who_have_verified(pair):
    flip(step_path(pair, 2) / "checkpoint.pt", 8 * 3000)  # in a tensor
    assert disk_format.read(step_path(pair, 2), verify=False)["global_step"] == 2


# -- which is newest ----------------------------------------------------------------------------------------------------


def test_the_newest_is_the_one_saved_last_even_where_a_later_step_was_left_behind(tmp_path):
    """A run resumed from step 2 on purpose: steps 4 and 6 belong to the time line it left."""
    save(tmp_path, 2, 4, 6)
    assert disk_format.newest_good(tmp_path) == (step_path(tmp_path, 6), [])
    save(tmp_path, 3)
    assert disk_format.newest_good(tmp_path) == (step_path(tmp_path, 3), [])


def test_a_save_whose_link_was_not_made_any_more_is_found(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "last.ckpt").symlink_to("step-00000001.ckpt")
    save(tmp_path, 2)
    assert disk_format.newest_good(tmp_path) == (step_path(tmp_path, 2), [])
