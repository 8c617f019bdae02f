"""How long saving a checkpoint blocks training: asynchronous against synchronous saves, as paired ratios on this machine.

    python benchmarks/checkpoint_stall.py [--parameters 100e6] [--repeats 5] [--device cpu] [--folder .]

The checkpoint has fp32 weights and AdamW's two moments, 12 bytes per parameter. Each repeat saves once synchronously and once
asynchronously to the same folder; the result is the median of the ratios. The stall is the time until `save_checkpoint`
returns. Matrix products are timed before the save and while a thread writes. Where this thread shares the cores of the
training, as on a CPU, the slower products are a further cost of the asynchronous save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO


def state(parameters: int, device: str) -> dict:
    """Return a checkpoint with `parameters` parameters and their two moments, in tensors of 4 million elements."""
    sizes = [1 << 22] * (parameters >> 22) + [parameters % (1 << 22)] * bool(parameters % (1 << 22))
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {f"{kind}.{i}": torch.randn(size, device=device) for kind in kinds for i, size in enumerate(sizes)}
    return {"global_step": 0, "state_dict": tensors}


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(work, device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def multiply(matrix: torch.Tensor) -> None:
    for _ in range(10):
        matrix @ matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure; default: the temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(int(options.parameters), options.repeats, options.device, folder)
    finally:
        shutil.rmtree(folder)


def measure(parameters: int, repeats: int, device: str, folder: Path) -> None:
    checkpoint = state(parameters, device)
    matrix = torch.randn(1024, 1024, device=device)
    seconds(lambda: multiply(matrix), device)
    sync, background = FolderCheckpointIO(), AsyncFolderCheckpointIO()
    path = folder / "background.ckpt"
    print(f"{parameters / 1e6:.0f}M parameters, {12 * parameters / 1e9:.2f} GB, on {device}, {torch.get_num_threads()} threads")
    first = seconds(lambda: background.save_checkpoint(checkpoint, path), device)
    background.finished(path, wait=True)
    print(f"first asynchronous save, which also allocates memory: {first:.3f} s stall")
    print(" sync s  async s   ratio   written in s   matmul meanwhile")
    ratios = []
    for _ in range(repeats):
        alone = seconds(lambda: multiply(matrix), device)
        stalled = seconds(lambda: sync.save_checkpoint(checkpoint, folder / "sync.ckpt"), device)
        began = time.perf_counter()
        copied = seconds(lambda: background.save_checkpoint(checkpoint, path), device)
        meanwhile = []
        while background.finished(path) is None:
            meanwhile.append(seconds(lambda: multiply(matrix), device))
        written = time.perf_counter() - began
        ratios.append(copied / stalled)
        slower = statistics.median(meanwhile) / alone
        print(f"{stalled:7.3f}  {copied:7.3f}  {ratios[-1]:6.3f}  {written:13.2f}  {slower:16.2f}x")
    began = time.perf_counter()
    problem = disk_format.damage(path)
    assert problem is None, problem
    print(f"async / sync stall: {statistics.median(ratios):.3f}; verifying: {time.perf_counter() - began:.2f} s")
    background.teardown()


if __name__ == "__main__":
    main()
