"""Folders that were made to break `import`: wrong types in JSON, files elsewhere, broken headers. All are refused."""

import json
import random
import struct

import pytest
import torch
from family_models import model_of
from folders import theirs

from lit_llm.__main__ import main
from lit_llm.commands.import_hf import import_folder

VALUES = (None, "x", "", -1, 0, 1.5, True, [], {}, [1], {"a": 1}, 10**30, 1e308, float("nan"), float("inf"), [[{}]])


def outcome(folder, run) -> str:
    """ "imported", or the message. Any other exception fails the test."""
    before = sorted(path.name for path in run.parent.iterdir())
    try:
        import_folder(folder, run)
    except ValueError as error:
        assert type(error).__name__ == "UserError", repr(error)
        assert sorted(path.name for path in run.parent.iterdir()) == before
        return str(error)
    return "imported"


SLOW = ("gpt2", "mistral", "qwen2", "qwen3", "olmo3", "gemma2", "gemma3_text", "smollm3", "phi3", "gpt_neox", "granite")


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_wrong_value_of_any_key_of_config_json_is_one_sentence_that_names_it(family, tmp_path):
    folder = tmp_path / "hf"
    model_of(family).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    seeded, imported, cases = random.Random(family), 0, 0
    for key in content:
        for value in seeded.sample(VALUES, 4):
            cases += 1
            (folder / "config.json").write_text(json.dumps({**content, key: value}))
            said = outcome(folder, tmp_path / f"run-{cases}")
            imported += said == "imported"
            assert all(len(line.replace(str(tmp_path), "")) < 400 for line in said.splitlines()), said
    rope = content.get("rope_parameters") or {}
    objects = {"rope_parameters": rope} if "rope_type" in rope else {f"rope_parameters/{key}": rope[key] for key in rope}
    for where, each in objects.items():
        for key in each:
            for value in seeded.sample(VALUES, 4):
                cases += 1
                changed = {**each, key: value}
                changed = changed if "/" not in where else {**rope, where.split("/")[1]: changed}
                (folder / "config.json").write_text(json.dumps({**content, "rope_parameters": changed}))
                outcome(folder, tmp_path / f"run-{cases}")
    assert cases >= 60 and imported >= 10  # keys that are not read, or that may be null


def test_sizes_that_no_machine_can_hold_are_refused_before_anything_is_built(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf")
    content = json.loads((tmp_path / "hf/config.json").read_text())
    for key, value, said in (
        ("num_hidden_layers", 200, "200 layers, but the weights are"),
        ("num_hidden_layers", 10**9, "'num_hidden_layers' is 1000000000, but lit_llm supports only a whole number from 1 to"),
        ("vocab_size", 10**12, "'vocab_size' is 1000000000000"),
    ):
        (tmp_path / "hf/config.json").write_text(json.dumps({**content, key: value}))
        assert said in outcome(tmp_path / "hf", tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "nonsense",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"model_type": ["llama"]}',
        '{"model_type": 3}',
        "\0",
        "9" * 9999,
    ],
)
def test_a_config_that_is_not_an_object_is_one_sentence(text, tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(text)
    assert main(["import", "--from", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "config.json" in line


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/ABSOLUTE", "sub/../../outside.safetensors", "..", "", ".", 3, None, ["x"]]
)
def test_an_index_cannot_name_a_file_outside_its_folder(target, tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf", max_shard_size="15KB")
    index = tmp_path / "hf/model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    real = tmp_path / "hf" / content["weight_map"][name]
    (tmp_path / "outside.safetensors").write_bytes(real.read_bytes())
    content["weight_map"][name] = str(tmp_path / "outside.safetensors") if target == "/ABSOLUTE" else target
    index.write_text(json.dumps(content))
    said = outcome(tmp_path / "hf", tmp_path / "run")
    assert f"'weight_map' maps {name} to " in said and "is not the name of a file in" in said


def test_a_weight_map_of_another_type_is_refused(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf", max_shard_size="15KB")
    for value in (None, [], 3, "x", [["a", "b"]]):
        (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
        assert "has no 'weight_map'" in outcome(tmp_path / "hf", tmp_path / "run")


def test_weights_may_be_links_as_in_the_cache_of_hugging_face(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "hf/model.safetensors").symlink_to("../blob")
    assert outcome(tmp_path / "hf", tmp_path / "run") == "imported"


def test_broken_headers_of_safetensors_are_one_sentence(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    good = file.read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    broken = [b"", b"x", good[:7], good[: 8 + length // 2], good[:-1], struct.pack("<Q", 2**63) + good[8:], b"\0" * 64]
    for change in (
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [-1, 4]},
        {"dtype": "F7"},
        {"shape": [2**40, 2**40]},
        {"shape": "x"},
        {"dtype": "I64"},
    ):
        raw = json.dumps({**header, name: {**header[name], **change}}).encode()
        broken.append(struct.pack("<Q", len(raw)) + raw + good[8 + length :])
    for content in broken:
        file.write_bytes(content)
        said = outcome(tmp_path / "hf", tmp_path / "run")
        assert "model.safetensors" in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("content", [[1], {"a": 3}, {3: torch.zeros(1)}, 5])
def test_a_pickle_with_something_else_than_tensors_by_name_is_one_sentence(content, tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    torch.save(content, tmp_path / "hf/pytorch_model.bin")
    assert "must hold tensors by their names" in outcome(tmp_path / "hf", tmp_path / "run")
