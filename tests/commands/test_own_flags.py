"""Flags of commands that take no recipe, and values that begin with a dash: every mistake is one sentence."""

import errno
import os

import pytest

from lit_llm.__main__ import COMMANDS, main
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Flag, read, read_flags
from lit_llm.core.errors import UserError, library_errors

MISTAKES = {
    ("generate", "--run", "x", "--temprature", "1"): "unknown flag --temprature; did you mean --temperature?",
    ("generate", "--run", "x", "--top_k", "few"): "--top_k needs a whole number, not 'few'",
    ("generate", "--run", "x", "--temperature", "hot"): "--temperature needs a number, not 'hot'",
    ("generate", "--run", "x", "--temperature", "-1e-3"): "temperature is -0.001",
    ("generate", "--run", "x", "--chat", "yes"): "--chat is 'yes', it must be true or false",
    ("fit", "--config", "quickstart", "--print_config", "1"): "--print_config is '1', it must be true or false",
    ("generate", "--run", "x", "--device", "hpu"): "device hpu is not available on this machine (--device cpu)",
    ("clean", "--stream"): "error: unknown flag --stream (python",
    ("generate", "--run", "x", "--out", "y"): "add --prompts FILE, or remove --out",
    ("generate", "--run", "x", "fast"): "unexpected argument 'fast'",
    ("export", "--run", "x"): "arguments are required: --out",
    ("export", "--run", "x", "--out", "y", "--max-shard-gb", "-inf"): "max_shard_gb is -.inf, but must be a finite number",
    ("report", "--run", "x", "--csv", "y", "--nota", "z"): "unknown flag --nota; did you mean --note?",
    ("recipes", "list", "--jsn"): "unknown flag --jsn; did you mean --json?",
    ("recipes", "lst"): "invalid choice: 'lst'",
    ("plan", "--config", "quickstart", "--price", "much"): "--price needs a number, not 'much'",
    ("fit", "--config", "quickstart", "--modle.n_layer"): "unknown key modle.n_layer; did you mean model.n_layer?",
    ("fit", "--config", "quickstart", "--batch_size", "8"): "did you mean data.global_batch_size or data.micro_batch_size or",
    ("fit", "--config", "quickstart", "--warmup", "8"): "schedule.warmup_steps or",
    ("fit", "--config", "quickstart", "--model.n_layer"): "--model.n_layer needs a value",
    ("fit", "--config", "quickstart", "-model.n_layer", "3"): "a flag starts with two dashes",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistyped_flag_is_one_sentence(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and MISTAKES[words] in first
    assert all(line.startswith("error: unexpected argument") for line in others)  # the value of the unknown flag at most
    assert not list(tmp_path.iterdir())


class PanicException(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
        (PanicException("x"), "x"),
        (KeyError("weights"), "weights"),
    ],
    ids=repr,
)
def test_what_a_library_or_a_limit_refuses_of_a_file_names_the_file(error, reason):
    with pytest.raises(UserError, match=rf"^file\.bin cannot be read: .*{reason}"), library_errors("file.bin cannot be read"):
        raise error
    with pytest.raises(KeyboardInterrupt), library_errors("file.bin cannot be read"):
        raise KeyboardInterrupt


def test_a_deleted_working_directory_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", "--config", "quickstart"]) == 2
    assert "working directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "NODE_RANK", "SLURM_NTASKS", "PL_GLOBAL_SEED"])
def test_a_variable_of_a_launcher_that_is_no_number_is_one_sentence(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "many")
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert name in said and "'many'" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["fit", "--run_dir"], ["fit", "--data.paths"], ["generate", "--prompt"], ["report", "--csv"], []]
)
def test_a_word_that_is_not_utf_8_is_one_sentence(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main([*words, os.fsdecode(b"caf\xe9")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: 'caf\\xe9' is not UTF-8 text") and said.count("\n") == 1 and said.isascii()
    assert not words or said.endswith(f"({words[1]})\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["-1", "-1e-3", "-.5", "-inf", "-.inf", "-Infinity", "-nan", "-dash", "-"])
def test_a_value_may_begin_with_a_dash(value):
    assert read_flags(["--optimizer.lr", value, "--x", "1"]) == ([Flag("optimizer.lr", value), Flag("x", "1")], [], [])
    flags = OwnFlags(alone=True, prog="command")
    flags.add_argument("--prompt")
    assert flags.parse(["--prompt", value]).prompt == flags.parse([f"--prompt={value}"]).prompt == value


def test_own_flags_are_separated_from_those_of_the_recipe():
    flags = OwnFlags(prog="command")
    flags.add_argument("--rate", type=float)
    flags.add_argument("--sweep", nargs="+")
    flags.add_argument("--json", type=bool)
    flags.add_argument("--html", type=bool)
    words = [
        "--config",
        "a",
        "--rate",
        "-1e-3",
        "--sweep",
        "a=1",
        "b=2",
        "--optimizer.lr",
        "-1e-3",
        "--json",
        "--x",
        "alone",
        "--html=false",
    ]
    own, rest = flags.split(words)
    assert own.command == "command --config a --rate -1e-3 --sweep a=1 b=2 --optimizer.lr -1e-3 --json --x alone --html=false"
    del own.command
    assert vars(own) == {"rate": -0.001, "sweep": ["a=1", "b=2"], "json": True, "html": False}
    assert rest == ["--config", "a", "--optimizer.lr", "-1e-3", "--x", "alone"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_switch_of_every_command_takes_both_forms(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    parsers = []

    def made(flags, *words, **options):
        parsers.append(flags)
        return init(flags, *words, **options)

    init = OwnFlags.__init__
    monkeypatch.setattr(OwnFlags, "__init__", made)
    assert main([command, "--no_such_flag", "1"]) == 2
    for flags in parsers:
        for action in flags._actions:
            action.required = False
            if not action.option_strings or action.dest == "help":
                continue
            (flag,) = action.option_strings
            assert action.nargs != 0, f"{command} {flag} takes no value"
            if action.nargs == "?":
                for words, value in {(): True, ("true",): True, ("false",): False}.items():
                    assert getattr(flags.split([flag, *words])[0], action.dest) is value


@pytest.mark.parametrize("switch", ["replace", "accept_changes", "use_ema"])
def test_a_switch_among_the_keys_of_a_recipe_takes_both_forms(switch):
    for words, value in {(): "true", ("true",): "true", ("false",): "false"}.items():
        found = read(["--config", "quickstart", f"--{switch}", *words, "--run_dir", "x"])
        assert (found.value_of(switch), found.value_of("run_dir"), found.problems + found.bare) == (value, "x", [])
    for words, value in {(): True, ("true",): True, ("false",): False}.items():
        assert bool(read(["--print_config", *words]).asks_for("print_config")) is value
    assert read(["--model.n_layer"]).bare == ["model.n_layer"]


def test_help_of_a_command_without_a_recipe_lists_its_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", "--help"])
    assert ended.value.code == 0 and "--note" in capsys.readouterr().out
