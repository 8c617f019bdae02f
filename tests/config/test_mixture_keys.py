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


def slow(flag: str, sentence: str):
    return pytest.param(flag, sentence, marks=pytest.mark.slow)


def settings(*flags: str) -> dict:
    recipe = parse("fit", list(flags))
    assert recipe.problems == []
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
    found = settings(recipe, "--data.sources.web.max_epochs=2", "--data.sources.books.path=c", "--data.phases.weights.web=40")
    assert {name: (source["path"], source["max_epochs"]) for name, source in found["sources"].items()} == {
        "web": ("shards/web", 2),
        "code": ("shards/code", None),
        "books": ("c", None),
    }
    assert found["phases"][0]["weights"] == {"web": 80, "code": 20}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--data.sources=web", "data.sources is 'web', but must be a dict of sources"),
        ("--data.phases=[{weight: {web: 1}}]", "phase 1 of data.phases has the unknown key weight: it takes until and weights"),
        ("--data.phases=[{weights: {web: much}}]", "the weight of web in phase 1 is 'much', but must be a number"),
        slow("--data.sources=null", "data.sources is 'null', but must be a dict of sources"),
        slow("--data.sources.web=a", "data.sources.web is 'a', but must be a dict of settings"),
        slow("--data.sources.web.pth=a", "unknown key data.sources.web.pth; did you mean data.sources.web.path?"),
        slow("--data.sources.books.pth=a", "did you mean data.sources.books.path?"),
        slow("--data.phases=null", "data.phases is 'null', but must be a list of phases"),
        slow("--data.phases={weights: {web: 1}}", "data.phases is '{weights: {web: 1}}', but must be a list of phases"),
        slow("--data.phases=[3]", "phase 1 of data.phases is 3, but must be a dict"),
        slow("--data.phases=[{until: half, weights: {web: 1}}]", "until of phase 1 is 'half', but must be a number"),
        slow("--data.phases=[{weights: [80]}]", "weights of phase 1 are [80], but must be a dict"),
    ],
)
def test_a_wrong_shape_is_one_sentence(recipe, flag, sentence):
    problems = parse("fit", [recipe, flag]).problems
    assert len(problems) == 1 and sentence in problems[0], problems
