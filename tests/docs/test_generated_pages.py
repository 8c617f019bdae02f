"""docs/reference/recipes.md, callbacks.md and combinations.md are what their script writes, and the site has every page."""

import json
import os
import subprocess
import sys

import generated_pages
import pytest
from generated_pages import (
    FEATURES,
    REFERENCE,
    Feature,
    callbacks_page,
    combinations_page,
    logged,
    public_classes,
    recipes_page,
    refused_pairs,
)
from pages import ROOT, blocks


def test_the_page_of_recipes_is_written_from_their_headers():
    assert (REFERENCE / "recipes.md").read_text() == recipes_page(), "python tests/docs/generated_pages.py recipes"


def test_the_page_of_callbacks_is_written_from_the_docstrings():
    page = (REFERENCE / "callbacks.md").read_text()
    assert page == callbacks_page(), "python tests/docs/generated_pages.py callbacks"
    assert [name for name, cls in public_classes().items() if not logged(cls)] == ["MetricsFile"], "say `Logs: nothing.`"


def test_the_code_of_every_callback_makes_it():
    shown = blocks((REFERENCE / "callbacks.md").read_text())[1:]  # without the command
    made = {"Trainer": lambda **parts: parts}
    for name, code in zip(public_classes(), shown, strict=True):
        exec(code, made)
        assert type(made["part"]).__name__ == name
        assert made["trainer"] in ({"callbacks": [made["part"]]}, {"logger": [made["part"]]})


def test_a_pair_is_listed_if_it_alone_is_refused():
    chosen = [feature for feature in FEATURES if feature.name in ("pipeline ZBV", "loss in chunks", "EMA")]
    broken = Feature("broken", "broken", "--model.n_layer 0")  # alone, too: no fault of a pair
    (found,) = refused_pairs([*chosen, broken])
    assert [feature.name for feature in found[:2]] == ["pipeline ZBV", "loss in chunks"] and "--loss.chunk_size" in found[2]


@pytest.mark.slow
def test_the_page_of_combinations_is_written_from_the_refusals():
    assert all(not generated_pages.refusals(feature) for feature in FEATURES)
    assert (REFERENCE / "combinations.md").read_text() == combinations_page()


@pytest.mark.slow
def test_the_site_has_every_page_and_no_broken_link(tmp_path):
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    first = (tmp_path / "site/index.html").read_text()
    assert first.index('id="tasks"') < first.index('id="two-commands"') and 'href="plan/"' in first
    entries = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() + "/" for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= found
