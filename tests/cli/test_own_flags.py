"""Flags of commands that take no recipe, and values that begin with a dash: every mistake is one sentence."""

import pytest

from lit_llm.__main__ import main
from lit_llm.cli.arguments import Flag, read_flags
from lit_llm.cli.own_flags import OwnFlags

MISTAKES = {
    ("generate", "--run", "x", "--temprature", "1"): "unknown flag --temprature; did you mean --temperature?",
    ("generate", "--run", "x", "--top_k", "few"): "--top_k needs a whole number, not 'few'",
    ("generate", "--run", "x", "--temperature", "hot"): "--temperature needs a number, not 'hot'",
    ("generate", "--run", "x", "--temperature", "-1e-3"): "temperature is -0.001",
    ("generate", "--run", "x", "--prompt"): "--prompt needs a value",
    ("generate", "--run", "x", "fast"): "unexpected argument 'fast'",
    ("export", "--run", "x"): "arguments are required: --out",
    ("export", "--run", "x", "--outt=y"): "unknown flag --outt; did you mean --out?",
    ("export", "--run", "x", "--out", "y", "--max-shard-gb", "-inf"): "max_shard_gb is -inf, but must be above 0",
    ("consolidate", "--run", "x", "--out", "y", "--weight"): "unknown flag --weight; did you mean --weights?",
    ("curve", "--run", "x", "--out", "y", "--nota", "z"): "unknown flag --nota; did you mean --note?",
    ("import", "--form", "x", "--out", "y"): "unknown flag --form; did you mean --from?",
    ("recipes", "list", "--jsn"): "unknown flag --jsn; did you mean --json?",
    ("recipes", "copy", "quickstart", "there", "--callback"): "unknown flag --callback; did you mean --callbacks?",
    ("recipes", "lst"): "invalid choice: 'lst'",
    ("recipes", "--json"): "unknown flag --json",
    ("plan", "--config", "quickstart", "--price", "-1e-3"): "price is -0.001, but must be above 0",
    ("plan", "--config", "quickstart", "--price"): "--price needs a value",
    ("plan", "--config", "quickstart", "--price", "much"): "--price needs a number, not 'much'",
    ("fit", "--config", "quickstart", "--modle.n_layer"): "unknown key modle.n_layer; did you mean model.n_layer?",
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
    flags.add_argument("--json", action="store_true")
    words = ["--config", "a", "--rate", "-1e-3", "--sweep", "a=1", "b=2", "--optimizer.lr", "-1e-3", "--json", "alone"]
    own, rest = flags.split(words)
    assert vars(own) == {"rate": -0.001, "sweep": ["a=1", "b=2"], "json": True}
    assert rest == ["--config", "a", "--optimizer.lr", "-1e-3", "alone"]


def test_help_of_a_command_without_a_recipe_lists_its_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["curve", "--help"])
    assert ended.value.code == 0 and "--note" in capsys.readouterr().out
