"""Manifests with a valid checksum and wrong content, files that they do not list, and later versions of the format."""

import json
import random

import pytest
import torch
from saved import names, save, step_path

from lit_llm.checkpoint import disk_format, manifest
from lit_llm.core.errors import UserError


def forge(folder, **changes):
    """Change entries of a manifest and make its checksum right again."""
    content = json.loads((folder / manifest.MANIFEST).read_text())
    del content["checksum"]
    (folder / manifest.MANIFEST).write_bytes(manifest.encode({**content, **changes}))


GOOD = {"checkpoint.pt": {"bytes": 3, "sha256": "0"}}
WRONG = [
    *(
        {"files": value}
        for value in (3, None, [], "x", {}, {"checkpoint.pt": 3}, {"checkpoint.pt": {}}, [["checkpoint.pt", 1]])
    ),
    *(
        {"files": GOOD | {name: GOOD["checkpoint.pt"]}}
        for name in ("../x", "/etc/passwd", "shard-1-of-2.pt/../x", "", "manifest.json")
    ),
    {"files": {"checkpoint.pt": {"bytes": "3", "sha256": "0"}}},
    {"files": {"checkpoint.pt": {"bytes": 3, "sha256": 0}}},
    *({"step": value} for value in ("3", 1.5, [], {}, True)),
    *({"serial": value} for value in (None, "3", [], True)),
    *({"version": value} for value in (None, "2", [], True)),
    *({"versions": value} for value in (None, 3, "x")),
    {"format": 3},
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: str(change)[:40])
def test_a_manifest_with_a_wrong_type_is_damage_in_one_sentence(change, tmp_path):
    save(tmp_path, 1, 2)
    forge(step_path(tmp_path, 2), **change)
    said = disk_format.damage(step_path(tmp_path, 2))
    assert "is damaged: manifest.json has changed since it was written." in said and "\n" not in said
    assert disk_format.newest_good(tmp_path) == (step_path(tmp_path, 1), [said])
    for _ in range(2):
        with pytest.raises(UserError, match="is damaged"):
            disk_format.read(step_path(tmp_path, 2), verify=False)
    save(tmp_path, 3)  # the counter of saves does not trip over it
    assert disk_format.newest_good(tmp_path)[0] == step_path(tmp_path, 3)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "3", "[]", "null", "\0", "", '{"checksum": 1}'], ids=range(8)
)
def test_a_manifest_of_other_json_is_damage(text, tmp_path):
    save(tmp_path, 1, 2)
    (step_path(tmp_path, 2) / "manifest.json").write_text(text)
    assert disk_format.newest_good(tmp_path)[0] == step_path(tmp_path, 1)
    assert "is damaged" in disk_format.damage(step_path(tmp_path, 2))


def test_a_shard_that_the_manifest_does_not_list_is_refused_and_never_read(tmp_path):
    save(tmp_path, 1)
    path = step_path(tmp_path, 1)
    torch.save({"state_dict.a": {"offset": [0, 0], "part": torch.zeros(50, 40)}}, path / "shard-00000-of-00001.pt")
    said = disk_format.damage(path)
    assert said == f"checkpoint {path} is damaged: shard-00000-of-00001.pt is not one of the files in its manifest.json."
    with pytest.raises(UserError, match="is not one of the files"):
        disk_format.read(path)
    (path / "shard-00000-of-00001.pt").write_bytes(b"no torch file")
    assert torch.equal(disk_format.read(path, verify=False)["state_dict"]["a"], torch.ones(50, 40))  # as ranks above 0 read it


def test_auto_does_not_pass_over_an_intact_checkpoint_of_a_later_version(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(manifest, "VERSION", 3)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(UserError) as caught:
        disk_format.newest_good(tmp_path)
    assert str(caught.value) == (
        f"checkpoint {step_path(tmp_path, 2)} has format version 3, this lit_llm reads versions up to 2: update lit_llm, or go "
        "back to an older checkpoint (--resume PATH)"
    )
    save(tmp_path, 3)  # a newer one of this version: the later version is behind
    assert disk_format.newest_good(tmp_path) == (step_path(tmp_path, 3), [])
    assert names(tmp_path) == [f"step-0000000{step}.ckpt" for step in (1, 2, 3)]


def test_any_changed_byte_of_a_manifest_is_damage(tmp_path):
    save(tmp_path, 1)
    file = step_path(tmp_path, 1) / "manifest.json"
    good, rng = file.read_bytes(), random.Random(3)
    for place in rng.sample(range(len(good)), 60):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1 << rng.randrange(8)]) + good[place + 1 :])
        assert disk_format.damage(step_path(tmp_path, 1)) is not None, place
