"""No test leaves process-wide state to the next one."""

import logging
import os

import pytest
import torch.distributed as dist
from lightning.pytorch import seed_everything
from process_state import restored_process_state


def set_what_a_command_sets() -> None:
    seed_everything(1, workers=True, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    assert os.environ["PL_GLOBAL_SEED"] == os.environ["PL_SEED_WORKERS"] == "1"


def assert_nothing_is_left() -> None:
    assert "PL_GLOBAL_SEED" not in os.environ and "PL_SEED_WORKERS" not in os.environ
    assert logging.getLogger("lightning.pytorch").level == logging.INFO


def test_seeds_and_log_levels_are_restored_after_a_test():
    with restored_process_state():
        set_what_a_command_sets()
    assert_nothing_is_left()


def test_seeds_and_log_levels_are_restored_after_a_test_that_fails():
    with pytest.raises(KeyError), restored_process_state():
        set_what_a_command_sets()
        raise KeyError
    assert_nothing_is_left()


def test_the_environment_of_ranks_is_removed_and_changed_variables_are_restored(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # as if a fixture of a module had left it
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.delenv("NEW", raising=False)
    with restored_process_state():
        os.environ.update(MASTER_ADDR="127.0.0.1", CHANGED="2", NEW="3")
        del os.environ["KEPT"]
    assert os.environ["KEPT"] == os.environ["CHANGED"] == "1"
    assert not {"LOCAL_RANK", "MASTER_ADDR", "NEW"} & os.environ.keys()


def test_the_process_group_that_a_strategy_on_one_process_leaves_is_ended():
    with restored_process_state():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_every_test_is_isolated_without_asking_for_it(request):
    assert "isolated" in request.fixturenames


def test_tokenised_text_is_not_cached_in_the_home_directory(tmp_path):
    assert os.environ["LIT_LLM_CACHE"].startswith(str(tmp_path.parent))
