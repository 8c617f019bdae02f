"""`plan` starts without imports that it does not need, and with the same settings."""

import gc
import json
import subprocess
import sys

import fork_server
import pytest

from lit_llm.core.memory import without_garbage_collection

HEAVY = ("transformers",)
PLAN = "from lit_llm.__main__ import main; main(['plan', '--config', 'gpt2-124m', '--hardware', 'h100-sxm', '--devices', '8'])"
PARSE = """
import json, sys
from pathlib import Path
from lit_llm.commands.launch import import_lightning
if sys.argv[1] == "lean":
    import_lightning()
from lit_llm.config.parse import parse
found = {}
files = sorted(Path(sys.argv[2]).rglob("*.yaml"))
for file in [file for file in files if file.parent.name not in ("base", "strategy", "precision")][::12]:
    recipe = parse("fit", ["--config", str(file)])
    found[file.name] = [recipe.parser.dump(recipe.config, skip_check=True), recipe.problems, recipe.notes]
print(json.dumps(found))
"""


def printed(code, *arguments, run=subprocess.run):
    """What Python code prints in a process of its own."""
    ran = run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_garbage_is_collected_again_after_a_start():
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.slow
def test_a_plan_does_not_import_what_it_does_not_need_and_others_still_can():
    code = (
        f"{PLAN}; import sys; early = [name for name in {HEAVY} if name in sys.modules];"
        "import torchmetrics.functional.text.bert as bert, transformers;"
        "print(early, bert.AutoModel.from_pretrained == transformers.AutoModel.from_pretrained,"
        "      isinstance(transformers.AutoTokenizer, type))"
    )
    assert printed(code).splitlines()[-1] == "[] True True"


@pytest.mark.slow
def test_a_twelfth_of_the_recipes_have_the_same_settings_with_all_imports():
    folder = "lit_llm/recipes"
    lean, full = (
        json.loads(printed(PARSE, how, folder, run=run).splitlines()[-1])
        for how, run in (("lean", subprocess.run), ("full", fork_server.run))
    )
    assert len(lean) >= 4
    assert lean == full
