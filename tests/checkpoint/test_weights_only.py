"""No checkpoint is ever loaded in a way that could run code from it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("lit_llm", "callbacks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def test_every_load_is_of_weights_only():
    calls = [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert any(ast.unparse(call.func) == "torch.load" for _, call in calls)
    for path, call in calls:
        name = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        where = f"{path}:{call.lineno}"
        if name == "torch.load" or name.endswith(".load_from_checkpoint"):
            assert keywords.get("weights_only") == "True", where
        if (
            "ckpt_path" in keywords
            and keywords["ckpt_path"] != "None"
            and name.partition(".")[2] in ("fit", "validate", "test")
        ):
            assert keywords.get("weights_only") == "True", where
        assert name not in ("pickle.load", "pickle.loads", "torch.jit.load", "joblib.load"), where
