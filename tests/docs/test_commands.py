"""Every command in README, docs and recipe headers is tested: run as written, run on a smaller model, or only parsed.

`RULES` lists the kinds of commands and what the test does with each; docs/evidence/support-matrix.md sums it up. A command
without a rule fails. The commands of a page run in their order in a temporary project with text, a trained
run, token shards and a Hugging Face model. Flags that make a run small are appended to the command.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fork_server
import pyarrow.parquet
import pytest
import torch.distributed.checkpoint as dcp
import yaml
from ingest.chat_templates import unmarked
from pages import ROOT, Command, anchors, commands, files, flag_lines, pages
from ports import free_port
from resume.launcher import Launcher
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser

from lit_llm.__main__ import main
from lit_llm.certify.training import SIZES
from lit_llm.config.arguments import leaves
from lit_llm.config.resolve import resolved
from lit_llm.plan.planned_recipe import build_to_plan, planned_run

TEXT = "".join(f"def line_{i}(text): return 'repeats itself, {i * i} and {i % 7}'\n" for i in range(300))
STAND_INS = {"NAME": "quickstart", "HOST": "127.0.0.1", "THEIR-MODEL": "their-model"}
ELSEWHERE = {  # pages whose commands have a test file of their own
    "docs/your-project.md": "tests/docs/test_your_project.py",
    "docs/own-model.md": "tests/docs/test_your_project.py",
    "docs/own-data.md": "tests/docs/test_your_project.py",
    "docs/hugging-face.md": "tests/hf/test_hf_docs.py",
    "docs/serve.md": "tests/hf/test_gguf.py",
    "docs/lessons/loss.md": "tests/docs/test_lessons.py",
}
MODEL = ["--model.n_layer=1", "--model.n_head=2", "--model.n_embd=32", "--model.block_size=32", "--model.mlp=swiglu"]
SHORT = [
    *("--data.global_batch_size=4", "--data.micro_batch_size=2", "--trainer.max_steps=6"),
    *("--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=2", "--validation.every_n_steps=3"),
    *("--checkpoint.every_n_steps=3", "--samples=null", "--trainer.precision=32-true", "--trainer.accelerator=cpu"),
]
IMPORTED = {"finetune", "cpt", "sft", "dpo"}
"""Recipes that take their model from imported weights."""
TRAINED = ("quickstart", "bytes", "chars", *IMPORTED, "debug")
"""Recipes and overlays whose `fit` is run; the others are too large for a test and are only parsed."""


def small(words: list[str]) -> list[str]:
    """Add a short text, unless the command names one, and flags that make the run last about a second."""
    arguments = list(words)
    if "--run" in arguments:
        return arguments
    last = max(i for i, word in enumerate(arguments) if word == "--config")
    imported = bool(IMPORTED & set(arguments))
    chosen = [] if imported else MODEL
    if not imported and "--data" not in arguments and "mix.yaml" not in arguments:
        named = any(word.startswith("--data.tokenizer") for word in arguments)
        # Set every split: a recipe may name shards that do not exist here.
        text = ["--data=TextFiles", "--data.paths=my.txt", "--data.train=null", "--data.val=null", "--data.test=books/one.txt"]
        text += [] if named else ["--data.tokenizer=Bytes"]
        arguments[last + 2 : last + 2] = text
    added = [*chosen, *SHORT]
    if imported:
        added += [f"--data.block_size={256 if 'dpo' in arguments else 32}", "--loss.chunk_size=null"]  # a pair is not cut
    added += ["--additional_steps=4"] if "--additional_steps" in arguments else ["--schedule.warmup_steps=1"]
    if "--check_against" in arguments:  # the shipped curve belongs to the full-size recipe
        place = arguments.index("--check_against") + 1
        arguments[place] = arguments[place].replace("auto", "reference.csv")
    if {"sft", "dpo"} & set(arguments):  # pages show the flags of a small example: they must do, beside a CPU's
        named = {word.partition("=")[0] for word in arguments}
        named |= {"--trainer.max_steps"} if "--trainer.max_epochs" in named else set()
        added = [flag for flag in added if flag.partition("=")[0] not in named]
    return [*arguments, *added]


def run(arguments: list[str]) -> None:
    """Run a command in this process; it must succeed."""
    code = main(arguments)
    assert code == 0, (code, arguments)


def parse(arguments: list[str], *, devices: int) -> None:
    """Check every key, class and combination as `fit` does, for a number of devices that are not here, without training."""
    run, _ = planned_run(build_to_plan(arguments))
    assert run.layout.devices == devices and not run.problems(), arguments


def is_run(words: list[str]) -> bool:
    """Whether a `fit` command is run; otherwise it is only parsed."""
    names = {Path(words[i + 1]).stem for i, word in enumerate(words) if word == "--config"}
    return "--run" in words or bool(
        names & {*TRAINED, "small"} and not {"--trainer.devices", "--trainer.num_nodes"} & set(words)
    )


def train(words: list[str]) -> None:
    """Run `fit`, smaller."""
    assert is_run(words)
    begins = not {"--resume", "--replace", "--run_dir", "--run"} & set(words)  # the project already has this run
    run([words[0], *small(words[1:]), *(["--replace=true"] if begins else [])])


def find(words: list[str]) -> None:
    """Run `find-lr` with few and short runs."""
    few = {
        "find-lr": ["--seeds", "1", "--sweep_steps", "20", "--probe_steps", "5"],
        "find-batch": ["--seeds", "1", "--noise_steps", "4"],
    }
    run([words[0], *small(words[1:]), *few.get(words[0], [])])


def parse_fit(words: list[str]) -> None:
    """Parse a `fit` that is too large to run."""
    assert not is_run(words)
    value = {flag: int(words[words.index(flag) + 1]) for flag in ("--trainer.devices", "--trainer.num_nodes") if flag in words}
    parse(words[1:], devices=math.prod(value.values()))


def show_help(words: list[str]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(words)
    groups = words[2:] or ["model", "data", "optimizer", "schedule", "checkpoint", "trainer"]
    assert [group for group in groups if f"--{group}." not in printed.getvalue()] == []


def recipes(words: list[str]) -> None:
    if "small.yaml" in " ".join(words):  # the page says that its file belongs into recipes/
        shutil.copy("small.yaml", "recipes/small.yaml")
    run(words)


def doctor(words: list[str]) -> None:
    """A run of six steps on a short text makes many passes over it, which is a finding."""
    code = main(words)
    assert code in (0, 1), (code, words)


ONE_CHECK = ["--only", "graphs"]


def talk(words: list[str]) -> None:
    """Send one message through a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("What is 2 + 1?\n"))
        run([*words, "--max_new_tokens", "4"])


def certify(words: list[str]) -> None:
    """Run a quick check; for the page whose `plan` reads the certificate's speeds also the one that measures them."""
    speed = ["speed/plain loop"] if "--out" in words else []
    more = ["--out", "one-check.json"] if "--only" in words else [*ONE_CHECK, *speed]
    run([*words, *more, "--replace"])


def torchrun(words: list[str]) -> None:
    """Run two processes on one machine instead of the command's machines and devices.

    torchrun, whose ranks import for ten seconds each, starts those of several machines; of the others, it parses the flags.
    """
    changed = {"--nnodes": "1", "--nproc_per_node": "2", "--trainer.num_nodes": "1", "--trainer.devices": "2"}
    for flag, value in changed.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    start = words.index("-m")
    if is_certify := words[start + 2] == "certify":
        arguments = [*words[start + 3 :], *ONE_CHECK, "--replace"]
    else:
        mesh = ["--trainer.strategy.replicate=2"] if any("strategy/" in word for word in words) else []
        arguments = [*small(words[start + 3 :]), *mesh, "--run_dir=runs/launched"]
    launch = [*words[1:start], "--master_port", str(free_port()), "-m", "lit_llm", words[start + 2], *arguments]
    if "--node_rank" in words:
        command = [sys.executable, "-m", "torch.distributed.run", *launch]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = fork_server.run(command, env=environment, capture_output=True, text=True, timeout=240)
        codes, said = [done.returncode], done.stdout + done.stderr
    else:
        parsed = get_args_parser().parse_args(launch)
        assert parsed.module and parsed.training_script == "lit_llm" and parsed.nproc_per_node == "2"
        started = Launcher().run(parsed.training_script_args, Path.cwd(), ranks=2)
        codes, said = started.codes, started.said()
    assert set(codes) == {0}, said[-3000:]
    assert said.count("1 of 1 checks passed" if is_certify else "at step 6") == 1  # only rank 0 prints


def parse_tensorboard(words: list[str]) -> None:
    """Parse the flags; no server is started."""
    from tensorboard.program import TensorBoard

    board = TensorBoard()
    board.configure(["tensorboard", *words[3:]])
    assert Path(board.flags.logdir).is_dir()


def compile_script(words: list[str]) -> None:
    compile((ROOT / words[1]).read_text(), words[1], "exec")


def run_script(words: list[str]) -> None:
    runpy.run_path(words[1], run_name="__main__")


def dry_run_target(words: list[str]) -> None:
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def is_a_dependency(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    if words[2] == "-e" or " @ " in words[2]:  # extras of a checkout or an address
        extras = re.findall(r"\w+", words[-1].partition("[")[2].partition("]")[0])
        assert extras and all(f"\n{extra} = [" in project for extra in extras), words
    else:
        assert [name for name in words[2:] if not re.search(rf'"{re.escape(name)}[">]', project)] == [], words


def is_planned_elsewhere(words: list[str]) -> None:
    """That of a recipe's header, whose figures tests/recipes/test_recipes.py compares with those of this command."""
    header = (ROOT / "recipes" / f"{words[words.index('--config') + 1]}.yaml").read_text().replace("\\\n#", "")
    assert f"plan {shlex.join(words)}" in re.sub(" +", " ", header), words


def parse_sbatch(words: list[str]) -> None:
    """Parse `fit` for the processes that the script requests; test_slurm_script.py runs the script without SLURM."""
    script = (ROOT / words[1]).read_text()
    nodes, tasks = (re.search(rf"#SBATCH --{name}=(\d+)", script)[1] for name in ("nodes", "ntasks-per-node"))
    asked = ["--config", *words[2:], f"--trainer.num_nodes={nodes}", f"--trainer.devices={tasks}"]
    parse(asked, devices=int(nodes) * int(tasks))


def lit_llm(handler: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    return lambda words: handler(words[3:])


@dataclass(frozen=True)
class Rule:
    """One kind of command, and what the test does with it."""

    command: str
    """The commands, in words."""
    tested: str
    """What the test does with them."""
    pattern: str
    run: Callable[[list[str]], None]


RULES = [  # the first that matches
    Rule("`fit --help`", "run as written", r"python -m lit_llm fit --help( [\w.]+)?$", lit_llm(show_help)),
    Rule(
        "`fit` of quickstart, bytes, chars, finetune, cpt, sft, dpo, with `debug`, or with `--run`",
        "run with a small model on a short text",
        r"python -m lit_llm fit RUN ",
        lit_llm(train),
    ),
    Rule("`fit` of other recipes, or on several devices", "parsed only", r"python -m lit_llm fit ", lit_llm(parse_fit)),
    Rule(
        "`check`",
        "run with a small model on a short text",
        r"python -m lit_llm check ",
        lit_llm(lambda words: run(["check", *small(words[1:])])),
    ),
    Rule(
        "`find-lr`, `find-batch`",
        "run with a small model on a short text and few steps",
        r"python -m lit_llm find-(lr|batch) ",
        lit_llm(find),
    ),
    Rule("`recipes`", "run as written", r"python -m lit_llm recipes( |$)", lit_llm(recipes)),
    Rule(
        "`plan` in a recipe's header",
        "its figures are compared with the header's (tests/recipes/test_recipes.py)",
        r"python -m lit_llm plan HEADER ",
        is_planned_elsewhere,
    ),
    Rule(
        "`plan`, `validate`, `test`, `generate`, `report`, `import`, `export`",
        "run as written",
        r"python -m lit_llm (plan|validate|test|generate|report|import|export) ",
        lit_llm(run),
    ),
    Rule("`chat`", "run with one message through a pipe", r"python -m lit_llm chat ", lit_llm(talk)),
    Rule("`certify`", "run with one check or two", r"python -m lit_llm certify ", lit_llm(certify)),
    Rule("`doctor`", "run as written; it may have findings", r"python -m lit_llm doctor ", lit_llm(doctor)),
    Rule(
        "`clean`, `prepare`",
        "run as written",
        r"python -m lit_llm (clean|prepare) ",
        lit_llm(run),
    ),
    Rule(
        "`torchrun`",
        "run with two processes on one machine: that for several machines by torchrun itself, of others its flags are parsed",
        r"torchrun ",
        torchrun,
    ),
    Rule("`sbatch`", "parsed only", r"sbatch ", parse_sbatch),
    Rule("TensorBoard", "parsed only", r"python -m tensorboard\.main ", parse_tensorboard),
    Rule("`make`", "dry run (`make -n`)", r"make [\w-]+$", dry_run_target),
    Rule("`pip`", "the name is looked up in pyproject.toml", r"pip install ", is_a_dependency),
    Rule("a script that a page shows", "run as written", r"python [\w-]+\.py$", run_script),
    Rule("scripts in `benchmarks/` and `tests/`", "compiled only", r"python (benchmarks|tests)/\S+\.py", compile_script),
]


def rule(command: Command) -> Rule | None:
    words = with_stand_ins(command.words)
    line = shlex.join(words)
    if words[1:4] == ["-m", "lit_llm", "fit"] and is_run(words[3:]):
        line = line.replace(" fit ", " fit RUN ", 1)
    if command.page.startswith("recipes/"):
        line = line.replace(" plan ", " plan HEADER ", 1)
    return next((rule for rule in RULES if re.match(rule.pattern, line)), None)


def with_stand_ins(words: tuple[str, ...]) -> list[str]:
    several = "--trainer.devices" in words or words[0] == "sbatch"  # needs a batch that the ranks can share
    values = {**STAND_INS, "RECIPE": "llama2-7b" if several else "quickstart"}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in values))
    return [pattern.sub(lambda found: values[found[0]], word) for word in words]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A project with the files that the pages mention: text, a trained run, a Hugging Face model, a tokenizer."""
    folder = tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else _chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_LLM_CACHE", str(folder / "cache"))
        texts = ("my.txt", "books/one.txt", "books/more/two.txt", "my/three.txt", "old/five.txt", "text/four.txt", "docs/a.md")
        for name in texts:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(TEXT)
        write_corpus(Path("corpus"))
        run(["fit", *small(["--config", "quickstart"])])
        run(["report", "--run", "runs/quickstart", "--csv", "reference.csv"])
        checkpoints = Path("runs/quickstart/checkpoints")
        for name in ("stable.ckpt", "step-00000200.ckpt"):  # which longer runs have
            (checkpoints / name).symlink_to("step-00000003.ckpt")
        without = ["--model.input_convolution", "null", "--model.exclusive_attention", "false"]  # which transformers has not
        run(["fit", *small(["--config", "quickstart", *without, "--run_dir", "runs/theirs"])])
        run(["export", "--run", "runs/theirs", "--out", "their-model"])
        shutil.rmtree("runs/theirs")
        allow_positions(256, Path("their-model"))
        write_chats(Path("chat.jsonl"), Path("their-model"))
        questions = [line.strip() + "\n" for line in (ROOT / "docs/tasks.md").read_text().splitlines() if '{"query"' in line]
        Path("quiz.jsonl").write_text("".join(questions))
        shutil.copy("runs/quickstart/tokenizer.json", "tokenizer.json")
        write_distributed_checkpoints(Path("their-model"))
    return folder


def write_distributed_checkpoints(model: Path) -> None:
    """`step-1000`: weights of `llama-folder` without settings. `lightning-folder`: with settings."""
    shutil.copytree(model, "llama-folder")
    dcp.save(load_file(model / "model.safetensors"), checkpoint_id="step-1000")
    run(["export", "--run", "runs/quickstart", "--format", "dcp", "--out", "lightning-folder"])


def allow_positions(number: int, model: Path) -> None:
    """Let a model with rotary positions read longer texts than it was trained on, such as a page's small example."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": number}))


def write_corpus(folder: Path) -> None:
    """JSONL, compressed JSONL and Parquet."""
    folder.mkdir()
    documents = [f"Document {i} says {i * i} and {i % 7}. " * (1 + i % 5) for i in range(300)]
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    (folder / "web.jsonl").write_text("".join(lines[:100]))
    (folder / "code.jsonl.gz").write_bytes(gzip.compress("".join(lines[100:200]).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents[200:]}), folder / "books.parquet")


def write_chats(file: Path, model: Path) -> None:
    """Conversations, pairs of answers, and a model's template for them."""
    turns = [[("user", f"What is {i} + 1?"), ("assistant", f"It is {i + 1}.")] for i in range(200)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": one[0][1], "chosen": one[1][1], "rejected": "No."} for one in turns[:40]]
    file.with_name("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (model / "chat_template.jinja").write_text(unmarked("chatml"))


def write_sources() -> None:
    """The sources of recipes/cpt.yaml, beside the one that the page prepares."""
    saved = ["--data.tokenizer=TokenizerJSON", "--data.tokenizer.path=tokenizer.json"]
    run(["prepare", "--data=TextFiles", "--data.paths=old/five.txt", *saved, "--out=shards/old"])
    shutil.copytree("shards/old", "shards/best")


@contextlib.contextmanager
def _chdir(folder: Path):  # contextlib.chdir needs Python 3.11
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_every_mention_of_the_command_line_is_collected():
    for page in pages():
        collected = sum(str(command).count("-m lit_llm") for command in commands(page))
        assert page.read_text().count("-m lit_llm") == collected, f"{page}: a command inside a file's block is not tested"


FOLDERS = ("lit_llm", "callbacks", "recipes", "tests", "benchmarks", "docs")
PYTHON_FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
MARKDOWN = [*(page for page in pages() if page.suffix == ".md"), ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_files_and_pages_that_a_page_names_exist(page):
    """Also a Python file without its folder, unless the page shows it as one of the reader's own."""
    text = page.read_text()
    prose = re.sub(r"^ {4}.*$", "", text, flags=re.M)
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/(?:[\w./*-]*\w\.\w+\b|[\w./*-]*\w(?=[:`])))", prose)
    missing = [name for name in named if "NAME" not in name and not list(ROOT.glob(name))]
    bare = {name for name in re.findall(r"`([\w-]+\.py)[:`]", text) if not re.search(rf"(python|#) {name}", text)}
    missing += bare - PYTHON_FILES
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    missing += [target for target in linked if target and not (page.parent / target).exists()]
    for target, anchor in re.findall(r"\]\(([^):#\s]*)#([^)]+)\)", text):
        missing += [] if anchor in anchors(page.parent / target if target else page) else [f"{target}#{anchor}"]
    assert not missing


def test_how_to_pages_are_short():
    """Measurements belong to docs/evidence, and what is looked up to docs/reference."""
    how_to = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert {page.name for page in how_to if len(page.read_text().splitlines()) > 150} == set()


def test_training_in_ten_files_is_a_list_of_at_most_2_500_lines():
    """That the files exist is tested with all others that pages name."""
    text = (ROOT / "docs/design.md").read_text().partition("## Where things are")[0]
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", text, flags=re.M)
    assert len(named) == 10 and sum(len((ROOT / name).read_text().splitlines()) for name in named) <= 2_500


WORDS = {
    "README.md": 1_500,
    "docs/*.md": 21_000,
    "docs/evidence/*.md": 12_000,
    "docs/reference/*.md": 11_000,
    "CHANGELOG.md": 700,
}
GENERATED = {ROOT / f"docs/reference/{name}.md" for name in ("callbacks", "combinations", "recipes")}  # by generated_pages.py


@pytest.mark.parametrize("pattern", WORDS)
def test_pages_have_a_budget_of_words(pattern):
    """Raw rows are CSV files beside the pages."""
    written = [page for page in ROOT.glob(pattern) if page not in GENERATED]
    assert sum(len(page.read_text().split()) for page in written) <= WORDS[pattern]


def test_the_doctor_names_the_mistake_of_the_module_on_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("watched.py").write_text(files(ROOT / "docs/doctor.md")["watched.py"])
    run_script(["python", "watched.py"])
    capsys.readouterr()
    assert main(["doctor", "--run", "logs/watched"]) == 1
    assert re.findall(r"^(\w+): ([\w-]+)$", capsys.readouterr().out, re.M) == [("error", "targets-not-shifted")]


FLAGS = [(page.name, words) for page in pages() if page.suffix == ".md" for words in flag_lines(page)]


@pytest.mark.parametrize(("page", "words"), FLAGS, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_flags_listed_on_a_page_are_accepted_by_fit(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(files(ROOT / "docs/own-model.md")["mine.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["--config", "quickstart"] if "--architecture" not in words else ["--data", "PythonStdlib"]
    settings = dict(leaves(yaml.safe_load(resolved([*own, *words]))))
    for flag, value in zip(words[::2], words[1::2], strict=True):
        taken = settings[flag.removeprefix("--")]
        assert str(taken).rpartition(".")[2] == value.rpartition(".")[2] or taken == json.loads(value), (flag, taken)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


WITH_COMMANDS = [page for page in pages() if commands(page)]


PAGES = {page: page.relative_to(ROOT).as_posix() for page in WITH_COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=PAGES.values())
def test_every_command_of_a_page(page, template, tmp_path, monkeypatch, capsys):
    found = commands(page)
    unknown = [str(command) for command in found if rule(command) is None and command.page not in ELSEWHERE]
    assert not unknown, f"no rule in tests/docs/test_commands.py says how to test {unknown}"
    if found[0].page in ELSEWHERE:
        assert page.name in (ROOT / ELSEWHERE[found[0].page]).read_text()
        return
    if "pip install lm-eval" in page.read_text():
        pytest.importorskip("lm_eval")
    project = tmp_path / "project"
    shutil.copytree(template, project, symlinks=True)
    monkeypatch.chdir(project)
    monkeypatch.setenv("LIT_LLM_CACHE", str(project / "cache"))
    for name, content in files(page).items():
        Path(name).write_text(content)
    if "--config cpt" in page.read_text():
        write_sources()
    monkeypatch.setitem(SIZES, "small", SIZES["tiny"])
    for command in found:
        if any(other.words[: len(command.words) + 1] == (*command.words, "--html") for other in found):
            continue  # with this flag it prints the same
        chosen = rule(command)
        assert chosen is not None
        try:
            chosen.run(with_stand_ins(command.words))
        except BaseException as error:
            raise AssertionError(f"{command.page}: {command}\n{capsys.readouterr().err[-1500:]}") from error
        shutil.rmtree("runs/quickstart")  # every command starts from the same run
        shutil.copytree(template / "runs/quickstart", "runs/quickstart", symlinks=True)


def test_every_rule_has_a_command():
    used = {
        rule(command).pattern
        for page in WITH_COMMANDS
        if page.relative_to(ROOT).as_posix() not in ELSEWHERE
        for command in commands(page)
    }
    assert used == {rule.pattern for rule in RULES}, "a rule without a command"
