"""Plain Lightning files, files of others, later versions of ours."""

import importlib
import os
import random
import shutil
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from saved import flip, names, save, step_path

from lit_llm.checkpoint import disk_format, manifest


@pytest.fixture(scope="module")
def lightning_file(tmp_path_factory):
    """As ModelCheckpoint writes them."""

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(100, 100)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    folder = tmp_path_factory.mktemp("lightning")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_steps=3, accelerator="cpu", devices=1, default_root_dir=folder, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(3, 100)))
    trainer.save_checkpoint(folder / "epoch=0-step=3.ckpt")
    return folder / "epoch=0-step=3.ckpt"


def test_plain_lightning_files_are_read_checked_and_found(lightning_file, tmp_path):
    assert disk_format.damage(lightning_file) is None
    assert disk_format.read(lightning_file)["global_step"] == 3
    assert disk_format.newest_good(lightning_file.parent) == (lightning_file, [])
    with pytest.raises(ValueError, match=r"step=3\.ckpt is not a checkpoint of lit_llm: it has no manifest\.json"):
        disk_format.read_manifest(lightning_file)


def test_of_plain_files_the_highest_step_inside_is_newest_whatever_the_name(lightning_file, tmp_path):
    shutil.copy(lightning_file, tmp_path / "last.ckpt")  # ModelCheckpoint(save_last=True) writes a file
    torch.save({"global_step": 2, "state_dict": {}}, tmp_path / "epoch=0-step=2.ckpt")
    assert disk_format.newest_good(tmp_path) == (tmp_path / "last.ckpt", [])


def test_damage_to_the_tensors_of_a_plain_file_is_found(lightning_file, tmp_path):
    path = tmp_path / "a.ckpt"
    good = lightning_file.read_bytes()
    weights = disk_format.read(lightning_file)["state_dict"]["layer.weight"].numpy().tobytes()
    start = good.index(weights)
    for byte in random.Random(7).sample(range(start, start + len(weights)), 20):
        path.write_bytes(good)
        flip(path, byte * 8 + 3)
        with pytest.raises(ValueError, match=r"a\.ckpt is damaged: the contents of .*data/\d+ have changed"):
            disk_format.read(path)
    for length in (0, 10, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"a\.ckpt is (not a checkpoint, or it is )?damaged"):
            disk_format.read(path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"model": {}, "optimizer": {}}, "is not a checkpoint of lit_llm or of Lightning: it has no 'state_dict'"),
        ([1, 2], "it holds no dict"),
        ({"state_dict": {}, "x": Evil()}, r"cannot be loaded without running code from it: it holds \w+\.system"),
    ],
)
def test_files_of_others_are_refused_in_one_sentence(content, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "a.ckpt")
    with pytest.raises(ValueError, match=f"^a.ckpt .*{sentence}.*") as raised:
        disk_format.read("a.ckpt")
    assert "\n" not in str(raised.value)
    assert disk_format.newest_good(tmp_path)[0] is None
    assert names(tmp_path) == ["a.ckpt"]  # nothing was run


def test_text_folders_of_others_and_missing_ones_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.ckpt").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.ckpt is not a checkpoint, or it is damaged: torch\.save writes zip files"):
        disk_format.read(tmp_path / "a.ckpt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("x")
    with pytest.raises(ValueError, match=r"hf is not a checkpoint of lit_llm: it has no manifest\.json of one"):
        disk_format.read(tmp_path / "hf")
    (tmp_path / "hf" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ValueError, match=r"hf is not a checkpoint of lit_llm: it has no manifest\.json of one"):
        disk_format.read(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"there is no checkpoint .*never\.ckpt"):
        disk_format.read(tmp_path / "never.ckpt")
    assert "there is no checkpoint" in disk_format.damage(tmp_path / "never.ckpt")


def test_another_version_of_the_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 3)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 3, this lit_llm reads version 2"):
        disk_format.read(step_path(tmp_path, 1))


def test_the_compressed_states_of_torchao_load_where_it_is_installed(tmp_path, monkeypatch):
    from torchao.optim.subclass_8bit import OptimState8bit

    moment = OptimState8bit.zeros((64, 64), True, 256, "cpu")
    path = step_path(tmp_path, 1)
    disk_format.write({"global_step": 1, "state_dict": {}, "moment": moment}, path)
    # A process that has not imported torchao, and registers the class as the import would.
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        monkeypatch.setattr(importlib, "import_module", lambda _: torch.serialization.add_safe_globals([OptimState8bit]))
        assert isinstance(disk_format.read(path)["moment"], OptimState8bit)
        torch.serialization.clear_safe_globals()
        monkeypatch.undo()
        monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=ModuleNotFoundError(name="torchao")))
        with pytest.raises(ValueError, match="needs the package torchao: pip install torchao"):
            disk_format.read(path)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)
