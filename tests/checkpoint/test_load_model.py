"""`generate` loads a model from every kind of checkpoint."""

from dataclasses import asdict

import pytest
import torch

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.export import Source, export_folder
from lit_llm.core.errors import UserError
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.lora import LoRAConfig, merged_weights


def trained(**changes):
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    content = {"state_dict": weights, "model_config": asdict(config) | changes, "global_step": 1}
    return model.eval(), content


def test_a_model_comes_back_from_a_folder_and_from_a_plain_file(tmp_path):
    model, content = trained()
    disk_format.write(content, tmp_path / "folder.ckpt")
    torch.save(content, tmp_path / "plain.ckpt")
    ids = torch.tensor([[1, 2, 3]])
    for name in ("folder", "plain"):
        loaded = load_model(tmp_path / f"{name}.ckpt")
        assert not loaded.training
        with torch.no_grad():
            assert torch.equal(loaded(ids), model(ids))


def test_what_holds_no_model_of_this_version_is_refused_in_one_sentence(tmp_path):
    content = trained(n_tentacles=8)[1]
    disk_format.write(content, tmp_path / "later.ckpt")
    with pytest.raises(ValueError, match=r"later\.ckpt is from another version of lit_llm: .*n_tentacles.*--ckpt_path"):
        load_model(tmp_path / "later.ckpt")
    del content["model_config"]
    disk_format.write(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt is not a checkpoint of lit_llm: it has no model_config \(--ckpt_path\)"):
        load_model(tmp_path / "other.ckpt")


@pytest.mark.parametrize("of", ["width", "layers"])
def test_weights_that_are_not_those_of_the_settings_are_neither_loaded_nor_exported(of, tmp_path):
    content = trained()[1]
    content["model_config"] |= {"width": {"n_embd": 32}, "layers": {"n_layer": 2}}[of]
    disk_format.write(content, tmp_path / "a.ckpt")
    for use in (load_model, lambda path: export_folder(Source(path, tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9)):
        with pytest.raises(UserError, match=r"a\.ckpt"):
            use(tmp_path / "a.ckpt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shapes", [((2, 4), (6, 3)), ((2, 5), (6, 2)), ((3, 4), (6, 3)), ((2, 4), None)])
def test_adapters_that_do_not_fit_their_base_are_refused(shapes):
    """The base has (6, 4), the rank is 2: A is (2, 4) and B (6, 2)."""
    names = ("q.lora_a", "q.lora_b")
    adapters = {name: torch.ones(shape) for name, shape in zip(names, shapes, strict=True) if shape}
    assert merged_weights(
        {"q.weight": torch.ones(6, 4)}, {names[0]: torch.ones(2, 4), names[1]: torch.ones(6, 2)}, LoRAConfig(2)
    )
    for base in ({"q.weight": torch.ones(6, 4)}, {}):
        with pytest.raises(UserError, match=r"q\.lora_a"):
            merged_weights(base, adapters, LoRAConfig(2))
