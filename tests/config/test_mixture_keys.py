"""The nested settings of a mixture as flags and YAML: what is set, and what is refused in one sentence."""

from __future__ import annotations

import pytest

from lit_llm.config.parse import parse

RECIPE = """
data:
  class_path: Mixture
  init_args:
    sources: {web: {path: shards/web, max_epochs: 1}, code: {path: shards/code}}
    phases: [{until: 0.9, weights: {web: 80, code: 20}}, {weights: {web: 40, code: 60}}]
"""


def settings(*flags: str) -> dict:
    recipe = parse("fit", list(flags))
    assert recipe.problems == ()
    return recipe.config.data.init_args.as_dict()


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mix.yaml").write_text(RECIPE)
    return f"--config={tmp_path / 'mix.yaml'}"


def test_flags_alone_make_a_mixture():
    phases = "[{weights: {web: 80, code: 20}}]"
    found = settings("--data=Mixture", "--data.sources.code.path=b", "--data.sources.web.path=a", f"--data.phases={phases}")
    assert {name: source["path"] for name, source in found["sources"].items()} == {"web": "a", "code": "b"}
    assert [(phase["until"], phase["weights"]) for phase in found["phases"]] == [(1.0, {"web": 80, "code": 20})]


def test_flags_change_and_add_sources_of_a_recipe(recipe):
    found = settings(recipe, "--data.sources.web.max_epochs=2", "--data.sources.books.path=c")
    assert {name: (source["path"], source["max_epochs"]) for name, source in found["sources"].items()} == {
        "web": ("shards/web", 2),
        "code": ("shards/code", None),
        "books": ("c", None),
    }


def test_a_wrong_shape_is_one_sentence_with_its_key(recipe):
    flags = {
        **dict.fromkeys(("--data.sources=web", "--data.sources=null"), "data.sources"),
        **dict.fromkeys(("--data.phases=null", "--data.phases={weights: {web: 1}}", "--data.phases=[3]"), "data.phases"),
        **dict.fromkeys(("--data.phases=[{weight: {web: 1}}]", "--data.phases=[{weights: {web: much}}]"), "data.phases"),
        "--data.phases=[{until: half, weights: {web: 1}}]": "data.phases",
        "--data.phases.weights.web=40": "data.phases.weights.web is a part of a list",
        "--data.sources.web=a": "data.sources.web",
        "--data.sources.web.pth=a": "did you mean data.sources.web.path?",
    }
    for flag, words in flags.items():
        problems = parse("fit", [recipe, flag]).problems
        assert len(problems) == 1 and words in problems[0] and "Given value" not in problems[0], problems
