"""What is read as YAML: values, and one sentence for everything that is refused."""

import math
import re
from pathlib import Path

import pytest
import yaml

import lit_llm
from lit_llm.__main__ import main
from lit_llm.config.parse import parse
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, dump_yaml, read_yaml, read_yaml_file

SCALARS = {
    "1e-3": 0.001, "1E+3": 1000.0, ".5": 0.5, "-.5": -0.5, "1.": 1.0, "+1": 1, "-0": 0, "1_000": 1000, "0x10": 16, "0b11": 3,
    ".inf": math.inf, "-.inf": -math.inf, "true": True, "False": False, "null": None, "~": None, "": None, "nan": "nan",
    "inf": "inf", "1e": "1e", "2024-01-01": "2024-01-01", "=": "=", "y": "y", "no": "no", "Off": "Off", "12:30": "12:30",
    "010": 10.0, "'no'": "no", '"010"': "010", "a#b": "a#b",
}  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_scalars(text):
    for tree in (read_yaml(f"a: {text}")["a"], read_yaml(f"[{text}, 1]")[0] if text else None):
        assert (tree, type(tree)) == (SCALARS[text], type(SCALARS[text]))


REFUSED = {
    "lr: 1\nbetas: 2\nlr: 3": "sets the key lr at line 1 and again at line 3",
    "a:\n  b: {c: 1,\n c: 2}": "sets the key c at line 2 and again at line 3",
    "1: a\n'1': b": "sets the key 1 at line 1 and again at line 2",
    "? [a]\n: b": "is not valid YAML at line 1: found unhashable key",
    "[" * 5000 + "]" * 5000: "is not valid YAML",
    "a: *b": "is not valid YAML at line 1",
    "a: !!python/object/apply:os.system [x]": "at line 1: could not determine a constructor for the tag",
    "a: !mine 1": "at line 1: could not determine a constructor for the tag '!mine'",
    "a: 1\n---\nb: 1": "is not valid YAML at line 2",
    "a: {<<: 3}": "is not valid YAML at line 1: expected a mapping",
    "a: 1\nb: [": "is not valid YAML at line 3: did not find expected node content",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:20]))
def test_what_is_refused_is_one_sentence(text):
    with pytest.raises(InvalidYaml, match=re.escape(REFUSED[text])) as error:
        read_yaml(text)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_anchors_and_merge_keys():
    tree = read_yaml("a: &a {x: 1, y: [2]}\nb: {y: 3, <<: *a}\nc: {<<: [*a, {x: 9, z: 4}]}\nd: *a")
    assert tree == {"a": {"x": 1, "y": [2]}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": [2], "z": 4}, "d": {"x": 1, "y": [2]}}


def test_shipped_yaml_reads_as_pyyaml_reads_it():
    files = [*Path(lit_llm.__file__).parent.glob("recipes/**/*.yaml"), Path(lit_llm.__file__).parent / "core/hardware.yaml"]
    assert len(files) > 20
    for file in files:
        assert read_yaml_file(file) == yaml.safe_load(file.read_text()), file


TEXTS = [*SCALARS, *("yes", "010", "12:30", "0o10", "a: b", "- x", "#x", "x\ny", "\x07", "é", "<<", " a", "a ", "\t", "'", '"'),
         *("[a]", "{a}", "&a", "*a", "!a", "%a", "@a", "`a", "-", "?", ":", "\x85", "\u2028", "9" * 300)]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_what_is_written_is_read_as_the_same_text(text):
    for tree in (text, [text], {"a": text, "b": [{"c": text}]}):
        assert read_yaml(dump_yaml(tree)) == tree


def test_numbers_are_written_and_read_exactly():
    tree = {"a": [1e-05, 0.1, 1e22, 5e-324, math.inf, -math.inf, -0.0], "b": [0, -7, 10**30, True, None], "c": {}, "d": []}
    assert read_yaml(dump_yaml(tree)) == tree


# -- through the command line -------------------------------------------------------------------------------------------


def value_or_refusal(*words):
    try:
        recipe = parse("fit", list(words))
    except UserError:
        return UserError
    return UserError if recipe.problems else recipe.config.optimizer.init_args.lr


def test_the_same_text_as_a_flag_and_in_a_file_is_the_same_value(tmp_path):
    expected = {"-1e-3": -0.001, "-.5": -0.5, "1_0": 10.0, "0x10": 16.0, "010": 10.0, "no": UserError}
    for text, value in expected.items():
        (tmp_path / "recipe.yaml").write_text(f"optimizer: {{init_args: {{lr: {text}}}}}")
        found = value_or_refusal("--config", str(tmp_path / "recipe.yaml")), value_or_refusal("--optimizer.lr", text)
        assert found == (value, value), text


def special(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "comment.yaml").write_text("# nothing\n")
    (tmp_path / "list.yaml").write_text("[a]")
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  n_layer: 1 # \xe9")
    (tmp_path / "utf16.yaml").write_bytes("model: {}".encode("utf-16"))
    (tmp_path / "number.yaml").write_text("base: 3")
    (tmp_path / "dup.yaml").write_text("model: {n_layer: 1}\nmodel: {n_layer: 2}\n")


FILES = {
    "folder.yaml": "folder.yaml cannot be read: Is a directory",
    "empty.yaml": "empty.yaml has no settings",
    "comment.yaml": "comment.yaml has no settings",
    "list.yaml": "list.yaml has no settings",
    "latin.yaml": "latin.yaml is not UTF-8 text: byte 0xe9 at line 2",
    "utf16.yaml": "utf16.yaml is not UTF-8 text: byte 0xff at line 1",
    "number.yaml": "base is 3, but must be the name of a recipe (base, in number.yaml)",
    "dup.yaml": "dup.yaml sets the key model at line 1 and again at line 2",
}


@pytest.mark.parametrize("name", FILES, ids=lambda name: repr(name[:20]))
def test_files_that_cannot_be_recipes(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    special(tmp_path)
    assert main(["fit", "--config", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert FILES[name] in line and len(line) < 500


@pytest.mark.parametrize(
    "flag, said",
    [
        (["--loss", "{z_loss: 1e-4, z_loss: 0}"], "the value of loss sets the key z_loss at line 1 and again at line 1"),
        (["--schedule", "{class_path: WSD, init_args: {decay_fraction: !mine 1}}"], "the value of schedule is not valid YAML"),
    ],
)
def test_flags_keep_the_same_rules(tmp_path, monkeypatch, capsys, flag, said):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "quickstart", *flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.endswith(f"({flag[0]})") and len(line) < 300


def test_text_with_brackets_stays_text():
    found = parse(
        "fit", ["--samples", "TextSamples", "--samples.every_n_steps", "5", "--samples.prompts", '["[INST] {a", "x: y"]']
    )
    assert found.problems == () and list(found.config.samples.init_args.prompts) == ["[INST] {a", "x: y"]
    assert parse("fit", ["--run_dir", "{a"]).config.run_dir == "{a"
    assert parse("fit", ["--run_dir", "a:"]).config.run_dir == "a:"


def test_json_is_a_recipe(tmp_path):
    (tmp_path / "recipe.json").write_text('{\n\t"model": {"n_layer": 3},\n\t"optimizer": {"init_args": {"lr": 1e-3}}\n}')
    found = parse("fit", ["--config", str(tmp_path / "recipe.json")]).config
    assert found.model.n_layer == 3 and found.optimizer.init_args.lr == 0.001


def test_a_base_can_be_a_shipped_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("base: quickstart\nmodel: {n_layer: 7}")
    shipped = parse("fit", ["--config", "quickstart"]).config
    mine = parse("fit", ["--config", "mine.yaml"]).config
    assert mine.model.n_layer == 7 and mine.model.n_embd == shipped.model.n_embd and mine.schedule == shipped.schedule
    Path("mine.yaml").write_text("base: quikstart")
    assert main(["fit", "--config", "mine.yaml"]) == 2
    assert (
        "base recipe not found: quikstart (base: quikstart, in mine.yaml); did you mean quickstart?" in capsys.readouterr().err
    )
