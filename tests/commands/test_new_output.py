"""Every command that writes: nothing is overwritten without --replace true, and a failed command leaves nothing half-made."""

import os
import resource
import signal
from pathlib import Path

import pytest
from recipe_runs import run
from torch.distributed.checkpoint import api

from lit_llm.commands import new_output
from lit_llm.commands.new_output import lock, new_file, new_folder
from lit_llm.core.errors import UserError

HINT = "or replace it with --replace true"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with a run of two steps, its export, its text and its recipe."""
    from recipe_runs import RECIPE, TEXT

    from lit_llm.__main__ import main

    folder = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("text.txt").write_text(TEXT)
        Path("tiny.yaml").write_text(RECIPE)
        assert main(["fit", "--config", "tiny.yaml", "--trainer.max_steps", "2"]) == 0
        assert main(["export", "--run", "runs/tiny", "--out", "hf"]) == 0
    finally:
        os.chdir(before)
    return folder


COMMANDS = {  # command: is its output a folder
    ("export", "--format", "ckpt", "--run", "runs/tiny"): False,
    ("export", "--run", "runs/tiny"): True,
    ("import", "--from", "hf"): True,
    ("prepare", "--config", "tiny.yaml"): True,
    ("clean", "--data.paths", "text.txt"): True,
    ("export", "--format", "dcp", "--run", "runs/tiny"): True,
}
NAMES = ["ckpt", "export", "import", "prepare", "clean", "dcp"]
RESUMABLE = ("prepare", "clean")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_an_output_is_kept_until_it_is_replaced(command, run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(run_folder)
    is_folder, out = COMMANDS[command], tmp_path / "deep" / "out"
    assert run(capsys, *command, "--out", str(out))[0] == 0
    log = [".out.log"] if command[0] in RESUMABLE else []
    assert out.is_dir() is is_folder and sorted(os.listdir(out.parent)) == [*log, "out"]
    mine = out / "mine" if is_folder else out
    mine.write_text("mine")
    before = {name: data for name, data in files(tmp_path).items() if not name.endswith(".log")}
    code, _, err = run(capsys, *command, "--out", str(out))
    assert code == 2 and err == f"error: {out} exists already: give another name (--out), {HINT}\n"
    assert {name: data for name, data in files(tmp_path).items() if not name.endswith(".log")} == before
    assert run(capsys, *command, "--out", str(out), "--replace", "true")[0] == 0
    assert out.is_dir() is is_folder and (not is_folder or not mine.exists())
    assert sorted(os.listdir(out.parent)) == ([*log, "out", "out.1"] if is_folder else ["out"])
    if is_folder:
        assert {
            name.replace("deep/out.1/", "deep/out/"): data for name, data in files(tmp_path).items() if "out.1" in name
        } == before
    assert run(capsys, *command, "--out", str(out), "--replace", "maybe")[0] == 2


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_a_folder_in_place_of_a_file_and_other_wrong_places_are_refused(command, run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(run_folder)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("mine")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "circle").symlink_to("circle")
    before = files(tmp_path)
    wrong = {
        "file/under": "cannot be written",
        "dangling": HINT,
        "circle": HINT,
        "n" * 300: "File name too long",
    }
    wrong |= (
        {"file": "is a file: give a folder (--out)"} if COMMANDS[command] else {"folder": "is a folder: give a file (--out)"}
    )
    for name, said in wrong.items():
        for more in ((), ("--replace", "true")) if name in ("file", "folder", "file/under") else ((),):
            code, _, err = run(capsys, *command, "--out", str(tmp_path / name), *more)
            assert code == 2 and said in err and len(err.splitlines()) == 1, err
    assert files(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["circle", "dangling", "file", "folder"]


def test_a_run_is_not_exported_or_imported_over_itself(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder)
    before = files(run_folder)
    export = ("export", "--run", "runs/tiny")
    prepare = ("prepare", "--data", "TextFiles", "--data.paths", "hf/config.json")
    places = ((export, "runs/tiny"), (export, "runs"), (export, "runs/tiny/checkpoints"), (prepare, "hf"))
    for command, out in (*places, (("import", "--from", "hf"), "hf")):
        code, _, err = run(capsys, *command, "--out", out, "--replace", "true")
        assert code == 2 and "which is read: give another folder (--out)" in err, err
    assert files(run_folder) == before


@pytest.mark.parametrize("resumable", [None, "parts"])
@pytest.mark.parametrize("kill_before", range(4))
def test_a_kill_before_any_rename_leaves_the_old_output_and_the_old_or_the_new_one(
    kill_before, resumable, tmp_path, monkeypatch
):
    """A folder that is replaced is first renamed to NAME.1; a kill right then leaves it under that name only."""
    out, renames = tmp_path / "out", []

    def make(text):
        with new_folder(out, replace=True, resumable=resumable) as partial:
            if resumable:
                (partial / resumable).mkdir(exist_ok=True)
            (partial / "a").write_text(text)

    def rename(*names, right=os.rename):
        if len(renames) == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        renames.append(right(*names))

    make("old")
    if os.fork() == 0:
        monkeypatch.setattr(os, "rename", rename)
        make("new")
        os._exit(0)
    os.wait()
    texts = {path.name: (path / "a").read_text() for path in (out, tmp_path / "out.1") if path.exists()}
    assert texts in ({"out": "old"}, {"out.1": "old"}, {"out": "new", "out.1": "old"})
    make("newer")
    assert (out / "a").read_text() == "newer" and "old" in {path.read_text() for path in tmp_path.glob("out.*/a")}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_kill_leaves_the_old_output_and_the_next_command_clears_up(tmp_path):
    out = tmp_path / "out"
    with new_file(out, replace=False) as partial:
        partial.write_text("old")
    child = os.fork()
    if child == 0:
        with new_file(out, replace=True) as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".out.lock", ".out.partial", "out"]
    assert out.read_text() == "old"
    with new_file(out, replace=True) as partial:
        partial.write_text("new")
    assert out.read_text() == "new" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [new_file, new_folder])
def test_of_two_processes_with_one_output_the_second_is_refused(make, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def write(text):
        with make(out, replace=False) as partial:
            (partial if make is new_file else partial / "a").write_text(text)

    with make(out, replace=False) as partial:
        with pytest.raises(UserError, match=r"another process writes .*--out"):
            write("second")
        (partial if make is new_file else partial / "a").write_text("first")
    with pytest.raises(UserError, match="exists already"):
        write("third")
    assert (out if make is new_file else out / "a").read_text() == "first" and os.listdir(tmp_path) == ["out"]

    def ended(file, refusal):  # the first process deletes its lock between the second's two steps
        (tmp_path / ".new.lock").unlink()
        lock(file, refusal)

    monkeypatch.setattr(new_output, "lock", ended)
    with pytest.raises(UserError, match="another process writes"), make(tmp_path / "new", replace=False):
        pass


def test_a_full_disk_is_named_where_a_library_does_not(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for error in (
        RuntimeError("unexpected pos 704 vs 598"),
        OSError("26352 requested and 7744 written"),
        api.CheckpointException("", {}),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(UserError, match=r"File too large .--out"), new_folder(tmp_path / "out", replace=False):
                raise error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(type(error)), new_folder(tmp_path / "out", replace=False):
            raise error  # of a disk with room it is not the disk's
    assert os.listdir(tmp_path) == []


def test_an_exception_is_not_hidden_and_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "a", replace=False) as partial:
        (partial / "x").write_text("x")
        raise KeyError
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "b", replace=False):
        Path("/nothing/here").read_text()
    assert os.listdir(tmp_path) == []
    (tmp_path / "c").mkdir()
    with new_folder(tmp_path / "c", replace=False) as partial:  # an empty folder is no output
        (partial / "x").write_text("x")
    assert os.listdir(tmp_path) == ["c"] and os.listdir(tmp_path / "c") == ["x"]
    with pytest.raises(UserError), new_file(tmp_path / "c", replace=True):
        raise AssertionError("not reached")
