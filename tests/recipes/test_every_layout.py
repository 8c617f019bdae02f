"""Every recipe with every layout on 1 to 8 ranks starts without another edit, or the model or the batch is the reason.

The sizes of a layout are counted from its file. Nothing is trained: `fit`, `plan` and a dry run share the rule, and
tests/config/test_layouts.py starts some.
"""

from dataclasses import replace
from pydoc import locate

import pytest
import yaml

from lit_llm.config.recipe_files import SHIPPED, shipped
from lit_llm.core.errors import UserError
from lit_llm.distributed.layout import layout_of
from lit_llm.plan.planned_recipe import build_to_plan, planned_run

RECIPES = [
    name for name, header in shipped().items() if not header.is_overlay and name not in ("finetune", "cpt", "sft", "dpo")
]
OVERLAYS = {
    path.stem: yaml.safe_load(path.read_text())["trainer"]["strategy"] for path in (SHIPPED / "strategy").glob("*.yaml")
}

QUICK = ("quickstart", "chars", "gpt3-125m", "minicpm-2.4b")  # batches of one micro-batch, a ramp, a batch of 960


def mesh(strategy, ranks):
    """(data-parallel ranks, pipeline stages); None if so many ranks do not make the mesh."""
    if isinstance(strategy, str) or "init_args" not in strategy or "replicate" not in strategy["init_args"]:
        return (ranks, 1) if strategy != "auto" or ranks == 1 else None
    sizes = strategy["init_args"]
    fixed = sizes["context"] * sizes["tensor_parallel"] * sizes["pipeline"]
    copies = sizes["replicate"] * (1 if sizes["shard"] == "auto" else sizes["shard"])
    data_parallel, rest = divmod(ranks, fixed)
    fits = not rest and data_parallel and (data_parallel % copies == 0 if sizes["shard"] == "auto" else data_parallel == copies)
    return (data_parallel, sizes["pipeline"]) if fits else None


@pytest.mark.parametrize("recipe", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in RECIPES])
def test_every_layout_starts_or_says_why_the_model_or_the_batch_does_not_allow_it(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built = build_to_plan(["--config", recipe], devices=1)
    (alone, _), data = planned_run(built), built.datamodule
    started = 0
    for ranks in range(1, 9):
        for overlay, strategy in OVERLAYS.items():
            where = f"{recipe} with {overlay} on {ranks}"
            made = strategy if isinstance(strategy, str) else locate(strategy["class_path"])(**strategy["init_args"])
            sizes = mesh(strategy, ranks)
            if sizes is None:
                if overlay != "single":
                    with pytest.raises(UserError, match=r"(use .*\(--trainer.devices|needs .* process)"):
                        layout_of(made, ranks, 8)
                continue
            data_parallel, stages = sizes
            settings = replace(alone, layout=layout_of(made, ranks, 8))
            found = settings.problems()
            assert not any("micro_batch_size" in problem for problem in found), where
            batches = [batch for _, batch in settings.stages]
            shared = all(batch % data_parallel == 0 and batch // data_parallel >= stages for batch in batches)
            refused = [p for p in found if p.startswith(("global_batch_size", "batch_ramp: "))]
            assert bool(refused) != shared, (where, found)
            if shared:
                for batch in batches:
                    size, share = settings.sequences_of(batch), batch // data_parallel
                    most = [n for n in range(1, data.micro_batch_size + 1) if share % n == 0 and share // n >= stages]
                    assert size == max(most), where
            assert all(p in refused or any(word in p for word in ("model", "n_layer", "expert=")) for p in found), (
                where,
                found,
            )
            started += not found
    assert started >= 20, recipe
