"""Every command of docs/hugging-face.md, in its order, on a small model."""

import re
import shlex
from pathlib import Path

import torch
from folders import SIZE, randomise
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lit_llm.__main__ import main
from lit_llm.tokenizers import Bytes

DOCS = Path(__file__).parents[2] / "docs/hugging-face.md"


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    page = DOCS.read_text()
    Path("my.txt").write_text("Once upon a time there was a line of text.\n" * 60)
    recipe = re.search(r"^    # (tune\.yaml)\n((?:    .*\n)+)", page, re.M)
    Path(recipe[1]).write_text("\n".join(line[4:] for line in recipe[2].splitlines()))
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZE, "vocab_size": 257, "eos_token_id": 256})
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained("their-model")
    Bytes().save("their-model")
    commands = re.findall(r"^    python -m lit_llm (.*)$", page, re.M)
    assert [shlex.split(command)[0] for command in commands] == ["import", "generate", "validate", "fit", "export", "export"]
    for command in commands:
        assert main(shlex.split(command)) == 0, (command, capsys.readouterr().err)
    (folder,) = {name for name in re.findall(r"""from_pretrained\("([\w-]+)"\)""", page)}
    tuned = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == [97]
    moved = tuned.lm_head.weight - model.lm_head.weight
    assert 0 < moved.abs().max() < 1e-3  # trained, for ten steps of at most 2e-5
    assert AutoModelForCausalLM.from_pretrained("tuned-bf16", dtype="auto").dtype == torch.bfloat16
