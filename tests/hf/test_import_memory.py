"""`import` leaves weights in their memory-mapped files until they are written: it holds no copy of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_llm.checkpoint.disk_format import read
from lit_llm.hf.config_map import links, read_config
from lit_llm.models.gpt import GPT

SHARDS = 8
CONTENT = {
    **{"model_type": "phi3", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16},
    **{"intermediate_size": 5504, "vocab_size": 8000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
}
"""Its fused matrices are split on import."""

MEASURE = """
import sys, threading, time
from pathlib import Path
import safetensors.torch
from lit_llm.commands.import_hf import import_folder

def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {key: int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "VmHWM")}

def watch():
    while not done.is_set():
        anonymous.append(memory()["RssAnon"])
        time.sleep(0.002)

done, anonymous, before = threading.Event(), [], memory()
thread = threading.Thread(target=watch)
thread.start()
import_folder(Path(sys.argv[1]), Path(sys.argv[2]))
done.set()
thread.join()
print(max(anonymous) - before["RssAnon"], memory()["VmHWM"] - before["VmHWM"])
"""


def make_folder(folder: Path) -> tuple[int, int]:
    """A folder of random weights in 8 files. Returns the bytes of all and of the largest file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONTENT))
    config, _ = read_config(CONTENT)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    theirs = {link.theirs: link.shape([shapes[name] for name in link.ours]) for link in links(CONTENT)}
    total = sum(2 * torch.Size(shape).numel() for shape in theirs.values())
    files: list[dict] = [{}]
    for name, shape in theirs.items():
        if len(files) < SHARDS and sum(tensor.nbytes for tensor in files[-1].values()) >= total / SHARDS:
            files.append({})
        files[-1][name] = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)
    where = {}
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total, max(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_importing_half_a_gb_in_8_files_takes_no_anonymous_memory_for_them(tmp_path):
    total, largest = make_folder(tmp_path / "hf")
    assert 0.4e9 < total < 0.6e9 and largest < 0.2e9
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "hf"), str(tmp_path / "run")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    anonymous, resident = (int(word) for word in out.split())
    print(f"weights {total / 1e6:.0f} MB, anonymous {anonymous / 1e6:.0f} MB, resident {resident / 1e6:.0f} MB")
    assert anonymous < 50e6  # pages of one's own, which the kernel cannot drop
    assert resident < 1.1 * total  # with the mapped pages of the files, which it can
    saved = read(tmp_path / "run/checkpoints/last.ckpt", verify=False)["state_dict"]
    file = tmp_path / "hf/model-4.safetensors"
    name, fused = next((name, tensor) for name, tensor in load_file(file).items() if "gate_up" in name)
    block = name.split(".")[2]
    assert torch.equal(fused[:5504], saved[f"model.blocks.{block}.mlp.gate.weight"])
    assert torch.equal(fused[5504:], saved[f"model.blocks.{block}.mlp.up.weight"])
