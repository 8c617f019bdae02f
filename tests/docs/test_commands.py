"""Every command that README, docs and recipe headers show is run, or, where it takes another machine, parsed and checked whole.

`RULES` says how, in order; a command that no rule knows fails. Commands of a page run one after the other in a project of its
own, which has a run, text, shards and another's model in it; what makes them small is added behind what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pages import ROOT, Command, commands, files, flag_lines, pages
from ports import free_port

from lit_llm.__main__ import COMMANDS, main
from lit_llm.cli.parse_errors import leaves
from lit_llm.cli.planned_recipe import PlannedCLI
from lit_llm.cli.resolved_config import resolved
from lit_llm.commands.verify_resume import take_own_flags

TEXT = "".join(f"def line_{i}(text): return 'repeats itself, {i * i} and {i % 7}'\n" for i in range(300))
STAND_INS = {"NAME": "quickstart", "HOST": "127.0.0.1", "THEIR-MODEL": "their-model"}
ELSEWHERE = {  # pages whose commands all run in a test of their own, in their order
    "docs/your-project.md": "tests/docs/test_your_project.py",
    "docs/hugging-face.md": "tests/hugging_face/test_docs.py",
}
MODEL = ["--model.n_layer=1", "--model.n_head=2", "--model.n_embd=32", "--model.block_size=32", "--model.mlp=swiglu"]
SHORT = [
    *("--data.global_batch_size=4", "--data.micro_batch_size=2", "--trainer.max_steps=6"),
    *("--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=2", "--validation.every_n_steps=3"),
    *("--checkpoint.every_n_steps=3", "--samples=null", "--trainer.precision=32-true", "--trainer.accelerator=cpu"),
]
HERE = ("quickstart", "bytes", "chars", "finetune", "debug")
"""Recipes and overlays that make a run this machine can do."""


def small(words: list[str]) -> list[str]:
    """Arguments of a command that trains, with a text of a few lines unless they name one, and small enough for a second."""
    arguments = list(words)
    if "--run" in arguments:
        return arguments
    last = max(i for i, word in enumerate(arguments) if word == "--config")
    chosen = [] if "finetune" in arguments else MODEL
    if "finetune" not in arguments and "--data" not in arguments:
        named = any(word.startswith("--data.tokenizer") for word in arguments)
        # Every part is named: a recipe of shards that are not here names some.
        text = ["--data=TextFiles", "--data.paths=my.txt", "--data.train=null", "--data.val=null", "--data.test=books/one.txt"]
        text += [] if named else ["--data.tokenizer=Bytes"]
        arguments[last + 2 : last + 2] = text
    added = [*chosen, *SHORT]
    if "finetune" in arguments:
        added += ["--data.block_size=32", "--loss.chunk_size=null"]
    added += ["--additional_steps=4"] if "--additional_steps" in arguments else ["--schedule.warmup_steps=1"]
    if "--check-against" in arguments:  # the shipped curve is that of the whole recipe
        place = arguments.index("--check-against") + 1
        arguments[place] = arguments[place].replace("auto", "reference.csv")
    return [*arguments, *added]


def run(arguments: list[str]) -> None:
    """In this process, to its end, without a mistake."""
    code = main(arguments)
    # `check` judges the speed of this machine too.
    assert code == 0 or (code == 1 and arguments[0] == "check"), arguments


def checked(arguments: list[str]) -> PlannedCLI:
    """What `fit` makes of them before it touches devices: every key, class and combination."""
    words = list(arguments)
    if "--resume" in words and words[words.index("--resume") + 1] != "auto":
        del words[words.index("--resume") : words.index("--resume") + 2]
    return PlannedCLI(words)


def train(words: list[str]) -> None:
    names = {Path(words[i + 1]).stem for i, word in enumerate(words) if word == "--config"}
    several = any(word in ("--trainer.devices", "--trainer.num_nodes") for word in words)
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    elif "--run" in words or (names & {*HERE, "small"} and not several):
        begins = not {"--resume", "--replace", "--run_dir", "--run"} & set(words)  # where the project has a run already
        run([words[0], *small(words[1:]), *(["--replace=true"] if begins else [])])
    else:
        devices = words[words.index("--trainer.devices") + 1] if several else "1"
        nodes = words[words.index("--trainer.num_nodes") + 1] if "--trainer.num_nodes" in words else "1"
        assert checked(words[1:]).devices == int(devices) * int(nodes)


def recipes(words: list[str]) -> None:
    if "small.yaml" in " ".join(words):  # the page says where the file that it gives lies
        shutil.copy("small.yaml", "recipes/small.yaml")
    run(words)


def verify_resume(words: list[str]) -> None:
    """Three processes, in `tests/resume`: here, that its flags and the recipe are as they should be."""
    arguments = words[1:]
    kill, steps = take_own_flags(arguments)
    assert (kill, steps) == ("--kill" in words, int(words[words.index("--steps") + 1]))
    checked(arguments)


def torchrun(words: list[str]) -> None:
    """Two processes on one machine instead of what is written."""
    changed = {"--nnodes": "1", "--nproc_per_node": "2", "--master_port": str(free_port())}
    changed |= {"--trainer.num_nodes": "1", "--trainer.devices": "2"}
    for flag, value in changed.items():
        words[words.index(flag) + 1] = value
    start = words.index("-m")
    arguments = [*small(words[start + 3 :]), "--trainer.strategy.replicate=2", "--run_dir=runs/launched"]
    command = [sys.executable, "-m", "torch.distributed.run", *words[1 : start + 3], *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("at step 6") == 1  # rank 0 alone speaks


def tensorboard(words: list[str]) -> None:
    from tensorboard.program import TensorBoard

    board = TensorBoard()
    board.configure(["tensorboard", *words[3:]])
    assert Path(board.flags.logdir).is_dir()


def a_mention(words: list[str]) -> None:
    assert words[3] in COMMANDS, words


def a_script(words: list[str]) -> None:
    compile((ROOT / words[1]).read_text(), words[1], "exec")


def a_target(words: list[str]) -> None:
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def an_extra(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extra = re.fullmatch(r"lit_llm\[(\w+)\]", words[2])
    assert re.search(rf"^{extra[1]} = \[" if extra else rf'"{re.escape(words[2])}[">]', project, re.M), words


def a_batch_script(words: list[str]) -> None:
    """On as many processes as the script asks SLURM for; tests/test_slurm_script.py starts it."""
    script = (ROOT / words[1]).read_text()
    nodes, tasks = (re.search(rf"#SBATCH --{name}=(\d+)", script)[1] for name in ("nodes", "ntasks-per-node"))
    asked = ["--config", *words[2:], f"--trainer.num_nodes={nodes}", f"--trainer.devices={tasks}"]
    assert checked(asked).devices == int(nodes) * int(tasks)


def lit_llm(handler: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    return lambda words: handler(words[3:])


RULES: list[tuple[str, Callable[[list[str]], None]]] = [  # what a command begins with, and how it is run
    (r"python -m lit_llm [\w-]+$", a_mention),
    (r"python -m lit_llm fit ", lit_llm(train)),
    (r"python -m lit_llm check ", lit_llm(lambda words: run(["check", *small(words[1:])]))),
    (r"python -m lit_llm plan .*--calibrate", lit_llm(lambda words: run(["plan", *small(words[1:])]))),
    (r"python -m lit_llm recipes( |$)", lit_llm(recipes)),
    (r"python -m lit_llm (plan|validate|test|generate|curve|consolidate|import|export|prepare) ", lit_llm(run)),
    (r"python -m lit_llm verify-resume ", lit_llm(verify_resume)),
    (r"torchrun ", torchrun),
    (r"sbatch ", a_batch_script),
    (r"python -m tensorboard\.main ", tensorboard),
    (r"make [\w-]+$", a_target),
    (r"pip install ", an_extra),
    (r"python (benchmarks|tests)/\S+\.py", a_script),
]


def rule(command: Command) -> Callable[[list[str]], None] | None:
    line = shlex.join(command.words)
    return next((handler for pattern, handler in RULES if re.match(pattern, line)), None)


def with_stand_ins(words: tuple[str, ...]) -> list[str]:
    several = "--trainer.devices" in words or words[0] == "sbatch"  # with a batch that can be shared out
    values = {**STAND_INS, "RECIPE": "llama2-7b" if several else "quickstart"}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in values))
    return [pattern.sub(lambda found: values[found[0]], word) for word in words]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A project with what the pages speak of: text, a trained run, another's model, a tokenizer."""
    folder = tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else _chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_LLM_CACHE", str(folder / "cache"))
        for name in ("my.txt", "books/one.txt", "books/more/two.txt", "my/three.txt", "text/four.txt"):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(TEXT)
        run(["fit", *small(["--config", "quickstart"])])
        run(["curve", "--run", "runs/quickstart", "--out", "reference.csv"])
        checkpoints = Path("runs/quickstart/checkpoints")
        for name in ("stable.ckpt", "step-00000200.ckpt"):  # of longer runs
            (checkpoints / name).symlink_to("step-00000003.ckpt")
        run(["export", "--run", "runs/quickstart", "--out", "their-model"])
        shutil.copy("runs/quickstart/tokenizer.json", "tokenizer.json")
    return folder


@contextlib.contextmanager
def _chdir(folder: Path):  # contextlib.chdir is of Python 3.11
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_no_command_escapes():
    for page in pages():
        collected = sum(str(command).count("-m lit_llm") for command in commands(page))
        whole = sum(content.count("-m lit_llm") for content in files(page).values()) if page.suffix == ".md" else 0
        assert page.read_text().count("-m lit_llm") == collected + whole, page


FLAGS = [(page.name, words) for page in pages() if page.suffix == ".md" for words in flag_lines(page)]


@pytest.mark.parametrize(("page", "words"), FLAGS, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_flags_that_a_page_lists_are_flags_of_fit(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(files(ROOT / "docs/your-project.md")["mine.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["--config", "quickstart"] if "--architecture" not in words else ["--data", "PythonStdlib"]
    settings = dict(leaves(yaml.safe_load(resolved([*own, *words]))))
    for flag, value in zip(words[::2], words[1::2], strict=True):
        taken = settings[flag.removeprefix("--")]
        assert str(taken).rpartition(".")[2] == value.rpartition(".")[2] or taken == json.loads(value), (flag, taken)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


WITH_COMMANDS = [page for page in pages() if commands(page)]


QUICK = ("README.md", "docs/continue.md", "recipes/quickstart.yaml")
PAGES = {page: page.relative_to(ROOT).as_posix() for page in WITH_COMMANDS}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name, marks=() if name in QUICK else pytest.mark.slow) for page, name in PAGES.items()]
)
def test_every_command_of_a_page_runs(page, template, tmp_path, monkeypatch, capsys):
    found = commands(page)
    unknown = [str(command) for command in found if rule(command) is None and command.page not in ELSEWHERE]
    assert not unknown, f"no rule in tests/docs/test_commands.py says how to run {unknown}"
    if found[0].page in ELSEWHERE:
        test = (ROOT / ELSEWHERE[found[0].page]).read_text()
        assert page.name in test
        return
    project = tmp_path / "project"
    shutil.copytree(template, project, symlinks=True)
    monkeypatch.chdir(project)
    monkeypatch.setenv("LIT_LLM_CACHE", str(project / "cache"))
    for command in found:
        handler = rule(command)
        assert handler is not None
        try:
            handler(with_stand_ins(command.words))
        except BaseException as error:
            raise AssertionError(f"{command.page}: {command}\n{capsys.readouterr().err[-1500:]}") from error
        shutil.rmtree("runs/quickstart")  # each finds the same run, whatever the one before did to it
        shutil.copytree(template / "runs/quickstart", "runs/quickstart", symlinks=True)
