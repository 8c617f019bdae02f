"""Old names of classes mean the classes of today, unless the user's project has a class of that name."""

import sys
from pydoc import locate

import pytest
import yaml

from lit_llm.cli.resolved_config import resolved
from lit_llm.renamed_classes import RENAMED, current_name

# An overlay with an old name, and the name of today that must replace it.
OVERLAYS = [
    ("{schedule: {class_path: callbacks.WSD}}", "lit_llm.callbacks.WSD"),
    ("{schedule: callbacks.WSD}", "lit_llm.callbacks.WSD"),
    ("{optimizer: {class_path: lit_llm.optimizers.Lion}}", "lit_llm.optim.Lion"),
    ("{trainer: {callbacks: [{class_path: callbacks.CounterSeed, init_args: {seed: 1}}]}}", "lit_llm.callbacks.StepSeed"),
    (
        "{trainer: {strategy: {class_path: DDPStrategy, init_args: {ddp_comm_hook: lit_llm.ddp_reduction.reduce_in_fp32}}}}",
        "lit_llm.distributed.ddp.reduce_in_fp32",
    ),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder from which Python imports, as `python -m` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "callbacks"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", RENAMED)
def test_each_name_of_today_can_be_imported(name):
    assert locate(RENAMED[name]) is not None


@pytest.mark.parametrize(("overlay", "now"), OVERLAYS)
@pytest.mark.parametrize("as_base", [False, True])
def test_config_files_and_their_bases_may_use_old_names(project, overlay, now, as_base):
    (project / "old.yaml").write_text(overlay)
    (project / "new.yaml").write_text("base: old.yaml")
    names = set(strings_in(yaml.safe_load(resolved(["--config", "new.yaml" if as_base else "old.yaml"]))))
    assert now in names and not names & set(RENAMED)


def strings_in(tree):
    if isinstance(tree, dict | list):
        return [text for value in (tree.values() if isinstance(tree, dict) else tree) for text in strings_in(value)]
    return [tree] if isinstance(tree, str) else []


@pytest.mark.parametrize(
    ("flags", "group", "now"),
    [
        (["--schedule", "callbacks.WSD"], "schedule", "lit_llm.callbacks.WSD"),
        (["--schedule=callbacks.schedule.WSD"], "schedule", "lit_llm.callbacks.WSD"),
        (["--schedule", "{class_path: callbacks.WSD}"], "schedule", "lit_llm.callbacks.WSD"),
        (["--optimizer", "lit_llm.optimizers.Lion"], "optimizer", "lit_llm.optim.Lion"),
        (["--plan", "PlanWatch"], "plan", "lit_llm.training.plan_monitor.PlanMonitor"),
    ],
)
def test_flags_may_use_old_names(project, flags, group, now):
    assert yaml.safe_load(resolved(flags))[group]["class_path"] == now


def test_a_class_in_the_users_own_callbacks_keeps_its_name(project):
    (project / "callbacks.py").write_text("class TimeBreakdown: ...\n")
    assert current_name("callbacks.TimeBreakdown", needs_ours=False) == "callbacks.TimeBreakdown"
    assert current_name("callbacks.WSD", needs_ours=False) == "lit_llm.callbacks.WSD"  # the user has none


def test_where_a_key_needs_one_of_ours_a_class_that_does_not_extend_it_is_replaced_with_a_warning(project):
    (project / "callbacks.py").write_text("from lit_llm import callbacks\nclass WSD(callbacks.WSD): ...\nclass Cosine: ...\n")
    assert current_name("callbacks.WSD") == "callbacks.WSD"
    with pytest.warns(UserWarning, match=r"callbacks\.Cosine of this project does not extend"):
        assert current_name("callbacks.Cosine") == "lit_llm.callbacks.Cosine"


def test_a_folder_of_the_user_that_cannot_be_imported_keeps_the_name_so_that_its_error_is_shown(project):
    (project / "callbacks.py").write_text("import a_module_that_does_not_exist\n")
    assert current_name("callbacks.WSD", needs_ours=False) == "callbacks.WSD"


def test_any_other_string_stays():
    assert [current_name(text) for text in ("WSD", "callbacks", "callbacks.Mine", "torch.optim.AdamW")] == [
        "WSD",
        "callbacks",
        "callbacks.Mine",
        "torch.optim.AdamW",
    ]
