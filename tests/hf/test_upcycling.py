"""`import --upcycle`: a mixture of experts made of a dense model computes what the dense model does."""

import pytest
import torch
from folders import differ, ids, logits, theirs
from transformers import AutoModelForCausalLM, MixtralConfig

from lit_llm.__main__ import main
from lit_llm.checkpoint.load_weights import load_model


def imported(folder, *flags: str) -> torch.nn.Module:
    run = folder / f"run{len(flags)}"
    assert main(["import", "--from", str(folder / "hf"), "--out", str(run), *flags]) == 0
    return load_model(run / "checkpoints/last.ckpt")


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float32), ("llama, biases, geglu", torch.bfloat16)])
def test_the_logits_are_those_of_the_dense_model(name, dtype, tmp_path, capsys):
    theirs(name, dtype).save_pretrained(tmp_path / "hf")
    dense, sparse = imported(tmp_path), imported(tmp_path, "--upcycle", "5")
    assert "--expert_balance ExpertBalance" in capsys.readouterr().out
    assert (sparse.config.moe.experts, sparse.config.moe.top_k) == (5, 2)
    more = sparse.config.n_layer * 5 * (sparse.config.n_embd + 2)  # routers, with their two buffers
    whole = sum(tensor.numel() for tensor in sparse.state_dict().values())
    mlps = sum(p.numel() for key, p in dense.named_parameters() if ".mlp." in key)
    assert whole == sum(p.numel() for p in dense.parameters()) + 4 * mlps + more
    routers = [block.mlp.router for block in sparse.blocks]
    assert not torch.equal(routers[0].weight, routers[1].weight) and all(router.weight.std() > 0.01 for router in routers)
    dense, sparse = dense.double(), sparse.double()  # the weights of two experts sum to 1, but for rounding
    assert differ(logits(sparse, ids(2, 20)), logits(dense, ids(2, 20))) < 1e-12


def test_a_model_with_experts_is_refused(tmp_path, capsys):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 101}
    config = MixtralConfig(**size, intermediate_size=24, num_local_experts=3, max_position_embeddings=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    assert main(["import", "--from", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--upcycle", "4"]) == 2
    assert "error: the model has 3 experts already: leave out --upcycle" in capsys.readouterr().err
