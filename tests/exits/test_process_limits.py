"""A limit of processes and threads (ulimit -u): exit code 2 and one sentence, and the folder is as before."""

import contextlib
import encodings.utf_8_sig
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

import lit_llm.config.build
import lit_llm.tokenizers.bpe
import lit_llm.training.fit
from lit_llm.__main__ import main

NOBODY = 54_321
IMPORTED = (encodings.utf_8_sig, lit_llm.config.build, lit_llm.tokenizers.bpe, lit_llm.training.fit)
"""Used by the commands; a user without rights may not read the packages."""
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
    """Exit code and stderr of a command in a fork that may start neither a process nor a thread."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.chdir(folder)
            os.environ.update(LIT_LLM_CACHE=str(folder / "cache"), HOME=str(folder))
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
            if os.getuid() == 0:  # whom no limit holds
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            with open(2, "w", closefd=False) as err, contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
                code = main(words)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (folder / "said").read_text()
    (folder / "said").unlink()
    return code, said


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
