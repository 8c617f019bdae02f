"""Pages of docs/reference that are written from code: recipes.md, callbacks.md and combinations.md.

    python tests/docs/generated_pages.py recipes callbacks combinations    # the last one takes minutes

`recipes_page` reads the headers of the recipes, `callbacks_page` the docstrings of `callbacks/`. `combinations_page` asks the
planner about every pair of `FEATURES` and lists the pairs that it refuses, with its own sentence.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from lit_llm import callbacks
from lit_llm.commands.recipes import FACTS, table
from lit_llm.config.groups import CALLBACKS, ClassGroup
from lit_llm.config.recipe_files import shipped
from lit_llm.core.errors import UserError
from lit_llm.plan.planned_recipe import build_to_plan

REFERENCE = Path(__file__).parents[2] / "docs/reference"
WRITTEN_BY = "<!-- written by tests/docs/generated_pages.py -->"

EXAMPLES = {
    "BatchRamp": "tokens_per_batch=[(0, 65_536), (10_000_000, 131_072)]",
    "Constant": "warmup_steps=100",
    "Cosine": "warmup_steps=100, final_ratio=0.1",
    "EMA": "decay=0.999",
    "GradientNorm": "clip=1.0",
    "HealthSignals": "every_n_steps=100",
    "Histograms": "every_n_steps=500",
    "InverseSquareRoot": "warmup_steps=100",
    "Linear": "warmup_steps=100, final_ratio=0.0",
    "MetricsFile": '"logs/metrics.jsonl"',
    "Profile": "wait=10, steps=3",
    "SpikeGuard": "sigma=6.0",
    "StepCheckpoint": 'every_n_steps=1000, dirpath="checkpoints"',
    "TaskScores": 'tasks=["quiz.jsonl"], every_n_steps=1000',
    "TextSamples": 'prompts=["Once upon a time"], every_n_steps=1000',
    "ValidateEvery": "every_n_steps=500",
    "WSD": "warmup_steps=100, decay_fraction=0.2",
}
"""Arguments of the code that the page shows; without an entry, a class has its defaults."""
LINKS = {"the curves of docs/reference/health.md, in five parts": "[these curves](health.md)"}


def recipes_page() -> str:
    """Every recipe with its title, and the overlays, as `python -m lit_llm recipes` lists them."""
    columns = ("name", "parameters", "training tokens", "smallest hardware that fits", "trains")
    lines = ["# All recipes", "", WRITTEN_BY, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| `{row['name']}` | {' | '.join(row[key] for key in (*FACTS, 'title'))} |" for row in table()]
    overlays = ", ".join(f"`{name}`" for name, header in shipped().items() if header.is_overlay)
    lines += ["", f"Overlays, which change some settings of a recipe: {overlays}."]
    return "\n".join(lines) + "\n"


def public_classes() -> dict[str, type]:
    """The callbacks, and the logger, by name. `Schedule` is abstract."""
    classes = {name: value for name, value in vars(callbacks.exports).items() if inspect.isclass(value)}
    return {name: cls for name, cls in sorted(classes.items()) if not inspect.isabstract(cls)}


def summary(cls: type) -> str:
    """The first paragraph of a docstring."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return re.sub(r" See :\w+:`.*?\.$| Off by default\.$", "", text)


def logged(cls: type) -> str:
    """The paragraph of a docstring that says what is logged, as Markdown. All schedules log what `Schedule` does."""
    source = callbacks.Schedule if cls is callbacks.Constant else cls
    paragraphs = inspect.cleandoc(source.__doc__ or "").split("\n\n")[1:]
    found = next((text for text in paragraphs if text.startswith("Logs")), None)
    if found is None:
        return f"`{cls.__name__}` logs the same curves as [Constant](#constant)." if issubclass(cls, callbacks.Schedule) else ""
    lines = re.sub(r"\n {8}", " ", found).splitlines()  # an entry goes on
    entries = [f"- {line.strip()}" for line in lines if line.startswith("    `")]
    head = " ".join(itertools.takewhile(lambda line: not line.startswith(" "), lines))
    for old, new in LINKS.items():
        head = head.replace(old, new)
    head = re.sub("^Logs:?", f"`{cls.__name__}` logs", head)
    return "\n".join([head, "", *entries]) if entries else head.rstrip(":.") + "."


def in_a_recipe(name: str, group: ClassGroup) -> bool:
    return name in (group.base.rpartition(".")[2], (group.default or "").rpartition(".")[2])


def callbacks_page() -> str:
    """Name, purpose, curves and three lines of code of every public class of `callbacks/`."""
    lines = ["# Callbacks", "", WRITTEN_BY, ""]
    lines += [
        "Each callback works with any LightningModule that uses automatic optimization ([your project](../your-project.md)).",
        "A recipe sets its arguments in a group: `--ema.decay 0.9999` sets `decay` in the group `ema`. The docstring of a",
        "class lists its arguments, hooks and errors. This command copies two callbacks and what they import:",
        "",
        "    python -m lit_llm recipes copy quickstart my-project --callbacks callbacks --only WSD,GradientNorm",
    ]
    for name, cls in public_classes().items():
        groups = [key for key, group in CALLBACKS.items() if in_a_recipe(name, group)]
        groups = groups or ["schedule"] * issubclass(cls, callbacks.Schedule)
        on = "" if not groups or CALLBACKS[groups[0]].default else ", which is off by default"
        place = f" Recipes set `{name}` in the group `{groups[0]}`{on}." if groups else ""
        use = "logger" if name == "MetricsFile" else "callbacks"
        lines += ["", f"## {name}", "", summary(cls) + place, ""]
        lines += [f"    from lit_llm.callbacks import {name}", f"    part = {name}({EXAMPLES.get(name, '')})"]
        lines += [f"    trainer = Trainer({use}=[part])", *(["", logged(cls)] if logged(cls) else [])]
    return "\n".join(lines) + "\n"


class Own(nn.Module):
    """A model of a user's."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


class Feature(NamedTuple):
    """Something that a recipe can ask for. Two of one kind exclude each other, and are no pair."""

    kind: str
    name: str
    flags: str

    def words(self) -> list[str]:
        return self.flags.split()


MODEL = "--model.n_layer 4 --model.n_head 4 --model.n_embd 256 --model.qk_norm false"
BASE = f"{MODEL} --data.global_batch_size 64 --data.micro_batch_size 8 --trainer.max_steps 100 --schedule.warmup_steps 10"
PIPELINE = "--config strategy/pp"
FEATURES = [
    Feature("layout", "DDP", "--config strategy/ddp"),
    Feature("layout", "FSDP2", "--config strategy/fsdp2"),
    Feature("layout", "tensor parallelism", "--config strategy/tp"),
    Feature("layout", "context with gathered keys", "--config strategy/cp"),
    Feature("layout", "context by heads", "--config strategy/cp --trainer.strategy.context_attention heads"),
    Feature("layout", "pipeline 1F1B", f"{PIPELINE} --trainer.strategy.schedule 1f1b"),
    Feature("layout", "pipeline ZBV", f"{PIPELINE} --trainer.strategy.schedule zbv"),
    Feature("layout", "expert parallelism", "--config strategy/ep --model.moe.experts 8"),
    Feature("blocks", "compiled blocks", "--compute.compile true"),
    Feature("recomputation", "checkpointing `full`", "--compute.activation_checkpointing full"),
    Feature("recomputation", "checkpointing `attention`", "--compute.activation_checkpointing attention"),
    Feature("recomputation", "checkpointing `cheap`", "--compute.activation_checkpointing cheap"),
    Feature("loss", "loss in chunks", "--loss.chunk_size 2048"),
    Feature("precision", "16-mixed", "--config precision/16-mixed"),
    Feature("precision", "bf16-true", "--config precision/bf16-true"),
    Feature("precision", "float8", "--config precision/float8"),
    Feature("kernel", "attention kernel `flex`", "--compute.attention flex"),
    Feature("kernel", "attention kernel `sdpa`", "--compute.attention sdpa"),
    Feature("objective", "preferences", "--objective Preference --model.mask_documents true"),
    Feature("adapters", "LoRA", "--lora.rank 8"),
    Feature("batch", "batch ramp", "--batch_ramp.tokens_per_batch [[0,8192],[40960,16384]]"),
    Feature("noise", "gradient noise", "--gradient_noise GradientNoise"),
    Feature("average", "EMA", "--ema EMA"),
    Feature("clip", "the Trainer's clipping", "--trainer.gradient_clip_val 1.0"),
    Feature("packing", "packing `best_fit`", "--data.packing best_fit"),
    Feature("model", "your own model", f"--architecture {__name__}.Own"),
    Feature("experts", "experts", "--model.moe.experts 8"),
    Feature("experts", "experts with ExpertBalance", "--model.moe.experts 8 --expert_balance ExpertBalance"),
    Feature("latent", "latent attention", "--model.latent.kv_rank 64 --model.qk_norm false"),
    Feature("tied", "tied embeddings", "--model.tie_embeddings true"),
    Feature("ahead", "tokens ahead", "--model.predict_ahead 1"),
    Feature("masks", "document masks", "--model.mask_documents true"),
    Feature("window", "windows", "--model.window 64"),
    Feature("sinks", "attention sinks", "--model.attention_sinks true"),
    Feature("dropout", "dropout", "--model.dropout 0.1"),
    Feature("width", "rates by width", "--model.base_width 128"),
    Feature("optimizer", "AdamW8bit", "--optimizer torchao.optim.AdamW8bit"),
    Feature("optimizer", "fused AdamW", "--optimizer AdamW --optimizer.fused true"),
]


def refusals(*features: Feature) -> list[str]:
    """What the planner refuses about a recipe with these features on two devices, one sentence each."""
    base = BASE if all(feature.kind != "model" for feature in features) else BASE.removeprefix(MODEL)
    words = [*base.split(), *itertools.chain.from_iterable(feature.words() for feature in features)]
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            build_to_plan(words, devices=2)
        except UserError as error:
            return str(error).splitlines()
    return []


def refused_pairs(features: Sequence[Feature] = FEATURES) -> Iterator[tuple[Feature, Feature, str]]:
    """Pairs of features that are refused together, but not alone, with the first sentence."""
    alone = {feature: set(refusals(feature)) for feature in features}
    for one, other in itertools.combinations(features, 2):
        if one.kind != other.kind:
            found = [sentence for sentence in refusals(one, other) if sentence not in alone[one] | alone[other]]
            if found:
                yield one, other, found[0]


def combinations_page(pairs: Iterable[tuple[Feature, Feature, str]] | None = None) -> str:
    """A table of refused pairs. Pairs with one sentence share a row if they share a feature."""
    names = "; ".join(feature.name for feature in FEATURES)
    lines = ["# What does not combine", "", WRITTEN_BY, ""]
    lines += [
        f"We put each pair of these features into one recipe for two devices: {names}.",
        "",
        "The table lists the pairs that `fit` and `plan` refuse before a run starts, with the first sentence of the error",
        "message. `fit` and `plan` accept all other pairs. Some [callbacks](callbacks.md) refuse more when training starts:",
        "see `Raises` in their docstrings.",
        "",
        "| feature | with | error message |",
        "|---|---|---|",
    ]
    rows: dict[tuple[str, str], list[str]] = {}
    for sentence, group in by_sentence(refused_pairs() if pairs is None else pairs).items():
        shared = [name for name in group[0] if all(name in pair for pair in group)]
        for pair in group:
            one, other = pair if not shared or pair[0] == shared[0] else pair[::-1]
            rows.setdefault((one, sentence), []).append(other)
    lines += [f"| {name} | {', '.join(others)} | {sentence} |" for (name, sentence), others in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def by_sentence(pairs: Iterable[tuple[Feature, Feature, str]]) -> dict[str, list[tuple[str, str]]]:
    """Sentence → names of the pairs. What a user's model does not read is one sentence."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one, other, text in pairs:
        text = text.replace(__name__, "mine")
        text = re.sub(r"^model\.\w+ is .*, but (mine\.Own does not read it).*$", r"\1: use architecture.init_args", text)
        found.setdefault(text, []).append((one.name, other.name))
    return found


if __name__ == "__main__":
    import generated_pages  # under the name that the planner imports

    for page in sys.argv[1:]:
        (REFERENCE / f"{page}.md").write_text(getattr(generated_pages, f"{page}_page")())
