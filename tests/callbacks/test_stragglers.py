"""Stragglers on one process; on several in test_time_ranks.py."""

from foreign import fit

from lit_llm.callbacks import Stragglers


def test_one_process_gets_no_row_and_no_hook(tmp_path):
    _, module, rows = fit([Stragglers()], tmp_path)
    assert rows == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
