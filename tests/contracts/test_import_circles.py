"""No import circle, of imports for annotations neither. The rules between rooms are in pyproject.toml."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("lit_llm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
