"""A limit of processes and threads (ulimit -u): exit code 2 and one sentence, and the folder is as before."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import fork_server
import pytest

LIMITED = """
import encodings.utf_8_sig, os, resource, sys
import lit_llm.config.build, lit_llm.tokenizers.bpe, lit_llm.training.fit  # a user without rights may not read packages
from lit_llm.__main__ import main

if os.getuid() == 0:  # whom no limit holds
    os.setgroups([])
    os.setgid(54_321)
    os.setuid(54_321)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
sys.stdout.flush()
code = main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""
RECIPE = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, tokenizer: Bytes, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
trainer: {max_steps: 2, accelerator: cpu, logger: false}
"""


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp())  # pytest's own has parents that only its user may enter
    path.chmod(0o777)
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "text.txt").write_text("\n\n".join(f"document {i} repeats itself" for i in range(80)))
    yield path
    shutil.rmtree(path)


def limited(folder: Path, words: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command that may start neither a process nor a thread.

    Not in a fork of this process: threads that a tokenizer has started here would be missing there, and waited for.
    """
    environment = {**os.environ, "LIT_LLM_CACHE": str(folder / "cache"), "HOME": str(folder)}
    command = [sys.executable, "-c", LIMITED, *words]
    done = fork_server.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("prepare --config recipe.yaml --out shards --workers 2", "--workers"),
        ("clean --data.paths text.txt --exact_duplicates true --out cleaned --workers 1", "--workers"),
        ("fit --config recipe.yaml --run_dir runs/mine", "ulimit -u"),
        (
            "fit --config recipe.yaml --data.tokenizer BPE --data.tokenizer.vocab_size 260 --run_dir runs/mine",
            "--data.tokenizer",
        ),
    ],
)
def test_a_limit_of_processes_is_one_sentence(folder, words, key):
    code, said = limited(folder, words.split())
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and key in errors[0] and "Traceback" not in said, said
    assert not [path for name in ("shards", "cleaned", "runs") for path in (folder / name).rglob("*") if path.is_file()]
