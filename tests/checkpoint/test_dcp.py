"""Folders of torch.distributed.checkpoint: torch reads what we write, we read what torch writes, and nothing is executed."""

import os
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.dcp_export import write_dcp
from lit_llm.checkpoint.dcp_folder import DcpFolder
from lit_llm.checkpoint.sharded import TensorOnDisk
from lit_llm.core.errors import UserError


def content():
    """Lightning's dict in small: weights in two dtypes, a scalar, an empty tensor, plain values."""
    weights = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.linspace(-1, 1, 5).bfloat16()}
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.full((3, 4), 0.25)}
    return {
        "global_step": 3,
        "state_dict": weights,
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "empty": torch.zeros(0, 3),
        "model_config": {"n_layer": 2, "window": None, "windows": [1, 2], "name": "x"},
    }


@pytest.fixture
def folder(tmp_path):
    dcp.save(content(), storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_what_torch_writes_is_read(folder):
    read, expected = DcpFolder(folder), content()
    found = {name: read[name] for name in read.files}
    assert found.keys() == {
        *("state_dict.model.a", "state_dict.model.b", "empty"),
        *("optimizer_states.0.state.0.step", "optimizer_states.0.state.0.exp_avg"),
    }
    assert torch.equal(found["state_dict.model.a"], expected["state_dict"]["model.a"])
    assert torch.equal(found["state_dict.model.b"], expected["state_dict"]["model.b"])
    assert found["state_dict.model.b"].dtype == torch.bfloat16 and found["empty"].shape == (0, 3)
    assert found["optimizer_states.0.state.0.step"] == 3
    assert read.value("model_config") == expected["model_config"] and read.value("global_step") == 3
    assert read.value("nothing") is None


def test_metadata_of_another_python_is_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr."""
    member = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(member, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    dcp.save({"a": torch.arange(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert DcpFolder(tmp_path)["a"].tolist() == [0, 1, 2]


def test_torch_reads_what_is_written_from_a_checkpoint_in_shards(tmp_path):
    values = torch.arange(2000.0).view(50, 40)
    parts = {"state_dict.a": {"offset": [0, 0], "part": values}}
    placeholder = {"sharded tensor": "state_dict.a", "shape": [50, 40], "dtype": "float32"}
    disk_format.write(checkpoint(7, state_dict={"a": placeholder, "b": torch.ones(3)}), tmp_path / "a.ckpt", parts=parts)
    assert write_dcp(disk_format.read(tmp_path / "a.ckpt", lazy=True), tmp_path / "dcp") == 2
    assert len(os.listdir(tmp_path / "dcp")) == 4  # two tensors, all values, .metadata
    target = {"state_dict": {"a": torch.zeros(50, 40), "b": torch.zeros(3)}, "global_step": 0}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(target["state_dict"]["a"], values) and torch.equal(target["state_dict"]["b"], torch.ones(3))
    assert target["global_step"] == 7


def test_one_tensor_at_a_time_is_in_memory_while_they_are_written(tmp_path, monkeypatch):
    alive, most, real = weakref.WeakSet(), [], TensorOnDisk.__getitem__

    def counted(self, box):
        tensor = real(self, box)
        alive.add(tensor.untyped_storage())
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(TensorOnDisk, "__getitem__", counted)
    halves = [([0, 0], torch.ones(2, 3)), ([2, 0], torch.zeros(2, 3))]
    weights = {f"w{i}": TensorOnDisk(f"w{i}", torch.Size([4, 3]), torch.float32, halves) for i in range(10)}
    assert write_dcp({"state_dict": weights}, tmp_path / "dcp") == 10
    assert len(most) == 10 and max(most) <= 2  # the one that is read, and the one that was written before
    assert torch.equal(DcpFolder(tmp_path / "dcp")["state_dict.w9"], torch.tensor([[1.0] * 3] * 2 + [[0.0] * 3] * 2))


# -- pickles that execute something -------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.how = (function, arguments)

    def __reduce__(self):
        return self.how


def dotted(path):
    """A pickle that finds an attribute of an attribute of an allowed module, and calls it."""
    module, _, name = path.partition(":")
    return b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93)R."


def attacks(mark):
    code = f"open({str(mark)!r}, 'w').close()"
    return [
        pickle.dumps(Calls(os.system, f"touch {mark}")),
        pickle.dumps(Calls(eval, code)),
        pickle.dumps(Calls(exec, code), protocol=0),
        pickle.dumps({"state_dict_metadata": [Calls(open, str(mark), "w")]}),
        dotted("torch.distributed.checkpoint.metadata:os.getcwd"),
        dotted("torch:load"),
    ]


def test_a_pickle_that_would_run_something_is_refused_in_one_sentence(folder, tmp_path):
    for number, attack in enumerate(attacks(tmp_path / "ran")):
        (folder / ".metadata").write_bytes(attack)
        with pytest.raises(UserError, match="is refused, because loading it would run") as caught:
            DcpFolder(folder)
        assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists(), number


def test_a_pickle_in_place_of_a_tensor_is_refused(folder, tmp_path):
    (file,) = folder.glob("*.distcp")
    place = DcpFolder(folder)._tensors["state_dict.model.a"].pieces[0][2]
    torch.save(Calls(os.system, f"touch {tmp_path / 'ran'}"), tmp_path / "attack.pt")
    raw, attack = bytearray(file.read_bytes()), (tmp_path / "attack.pt").read_bytes()
    assert len(attack) <= place.length
    raw[place.start : place.start + place.length] = attack.rjust(place.length, b"\0")
    file.write_bytes(raw)
    with pytest.raises(UserError, match="holds more than tensors"):
        DcpFolder(folder)["state_dict.model.a"]
    assert not (tmp_path / "ran").exists()


# -- damage -------------------------------------------------------------------------------------------------------------


def edited(folder, edit):
    metadata = FileSystemReader(folder).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info(metadata, name):
    return next(index for index in metadata.storage_data if index.fqn == name)


def beyond_the_end(metadata):
    index = info(metadata, "state_dict.model.a")
    metadata.storage_data[index] = replace(metadata.storage_data[index], offset=10**12)


def half(metadata):
    entry = metadata.state_dict_metadata["state_dict.model.a"]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2]))]


def huge(metadata):
    entry = metadata.state_dict_metadata["state_dict.model.a"]
    entry.size = torch.Size([10**9, 10**9])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([10**9, 10**9]))]


def other_dtype(metadata):
    metadata.state_dict_metadata["state_dict.model.a"].properties.dtype = torch.float16


def elsewhere(metadata):
    index = info(metadata, "state_dict.model.a")
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="../secret")


def text(metadata):
    metadata.storage_data = "text"


DAMAGES = {
    beyond_the_end: "is truncated",
    half: "are not the whole tensor",
    huge: "are not the whole tensor",
    elsewhere: "a file outside the folder",
    other_dtype: "is not as .metadata describes it",
    text: "not the metadata of torch.distributed.checkpoint",
}


@pytest.mark.parametrize("edit", DAMAGES, ids=lambda edit: edit.__name__)
def test_metadata_that_does_not_fit_its_files_is_one_sentence(folder, edit):
    edited(folder, edit)
    with pytest.raises(UserError, match=DAMAGES[edit]) as caught:
        DcpFolder(folder)["state_dict.model.a"]
    assert "\n" not in str(caught.value)
