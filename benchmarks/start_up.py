"""Start-up of a run on many token shards: what each of two processes does before the first batch.

    ulimit -n 1024; python benchmarks/start_up.py [--shards 10000] [--folder /tmp]

Two gloo processes set up the data of one run, as `fit` does: rank 0 checks the settings (`problems`), opens the data once
without a trainer, and then Lightning calls `setup` on both. Printed for each rank: seconds by the clock and of the processor,
and what was done with the shards: files opened and looked up (`stat`, lists of the folder are one operation each). Runs with
a manifest (`--data.path`) and without one (`--data.train`, which reads every header). `--only files` runs on versions
without manifests too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SHARD_TOKENS = 2048
VAL_SHARDS = 4


def make(folder: Path, shards: int) -> None:
    """Shards of random bytes, and their manifest where this version has one."""
    from lit_llm.data import Bytes, ShardWriter

    os.fsync = lambda descriptor: None  # the files need not survive a power cut
    random = np.random.default_rng(0)
    written = {}
    for name, count in (("train", shards), ("val", VAL_SHARDS)):
        with ShardWriter(folder, name, vocab_size=257, shard_tokens=SHARD_TOKENS) as writer:
            for _ in range(count):
                writer.write(random.integers(0, 256, SHARD_TOKENS))
        written[name] = writer
    try:
        from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
    except ImportError:
        return
    splits = {name: SplitInfo(0, w.tokens, w.tokens, 0, 0, w.tokens_blake2b, tuple(w.shards)) for name, w in written.items()}
    Bytes().save(folder)
    Manifest(Bytes().identity(), 257, None, 256, splits).write(folder)


class Watch:
    """Counts what this process does with shards, from Python and from numpy."""

    def __init__(self) -> None:
        self.counts = {"opened": 0, "looked up": 0, "headers read": 0}
        sys.addaudithook(self._hear)
        stat, pread, fromfile = os.stat, os.pread, np.fromfile

        def counted_stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            self.counts["looked up"] += str(path).endswith(".bin")
            return stat(path, *arguments, **options)

        def counted_pread(descriptor: int, length: int, start: int) -> bytes:
            self.counts["headers read"] += start == 0
            return pread(descriptor, length, start)

        def counted_fromfile(file: Any, *arguments: Any, **options: Any) -> np.ndarray:
            self.counts["headers read"] += str(file).endswith(".bin")
            return fromfile(file, *arguments, **options)

        os.stat, os.pread, np.fromfile = counted_stat, counted_pread, counted_fromfile

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".bin"):
            self.counts["opened"] += 1


def rank(folder: Path, how: str) -> None:
    """One of the two processes."""
    import torch.distributed as dist
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from lit_llm.data import TokenShards

    settings: dict[str, Any] = {"path": str(folder)}
    if how == "files":
        settings = {"train": f"{folder}/train_*.bin", "val": f"{folder}/val_*.bin", "vocab_size": 257}
    data = TokenShards(block_size=64, global_batch_size=4, **settings)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), logger=False, barebones=True
    )
    trainer.strategy.setup_environment()
    watch = Watch()
    clock, processor = time.perf_counter(), time.process_time()
    assert data.problems(2) == []
    if trainer.is_global_zero:
        data.setup()
    own = time.perf_counter() - clock, time.process_time() - processor
    dist.barrier()  # rank 0 starts the others after this in a run that Lightning launches
    clock, processor = time.perf_counter(), time.process_time()
    data.trainer = trainer
    data.setup()
    shared = time.perf_counter() - clock, time.process_time() - processor
    result = {"clock": own[0] + shared[0], "processor": own[1] + shared[1], **watch.counts}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))
    assert len(next(iter(data.train_dataloader()))["input_ids"])
    dist.barrier()
    dist.destroy_process_group()


def run_both(command: list[str]) -> None:
    """Run a command as rank 0 and rank 1 of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    ranks = [
        subprocess.Popen(command, env=common | {"LOCAL_RANK": number}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for number in "01"
    ]
    for process in ranks:
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(errors.decode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--only", choices=["path", "files"])
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank(Path(options.rank_of[0]), options.rank_of[1])
        return
    print(f"{options.shards} shards, ulimit -n {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        make(Path(name), options.shards)
        for how in ["path", "files"] if options.only is None else [options.only]:
            without = Path(name) / "meta.json"
            if how == "files":
                without.unlink(missing_ok=True)
            for _ in range(2):  # the second finds the folder in the system's cache
                run_both([sys.executable, __file__, "--rank-of", name, how])
            for number in (0, 1):
                found = json.loads((Path(name) / f"rank{number}.json").read_text())
                seconds = f"{found.pop('clock'):6.2f} s by the clock, {found.pop('processor'):6.2f} s of the processor"
                print(f"{how:6} rank {number}: {seconds}, {', '.join(f'{count} {what}' for what, count in found.items())}")


if __name__ == "__main__":
    main()
