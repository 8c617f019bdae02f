"""Private names of other packages are used in the modules for internals and nowhere else (found by private_names.py)."""

from private_names import found

INTERNALS = {"callbacks/_lightning.py", "callbacks/_torch.py", "lit_llm/core/_lightning.py", "lit_llm/core/_torch.py"}
# Methods that a subclass overrides can only be named in the subclass; test_torch.py holds them, too.
OVERRIDDEN = {("lit_llm/models/small_layers.py", "_apply")}


def test_no_other_module_uses_a_private_name():
    elsewhere = [use for use in found() if use.path not in INTERNALS and (use.path, use.name) not in OVERRIDDEN]
    assert elsewhere == [], "\n".join(f"{use.path}:{use.line}: {use.name}" for use in elsewhere)


def test_the_search_finds_uses_where_they_are_known_to_be():
    names = {(use.path, use.name) for use in found()}
    assert ("callbacks/_lightning.py", "_should_check_val_fx") in names
    assert ("lit_llm/core/_lightning.py", "lightning.pytorch.loops.progress._ProcessedTracker") in names
    assert ("callbacks/_torch.py", "torch.distributed.tensor._utils.compute_local_shape_and_global_offset") in names
    assert names >= OVERRIDDEN
