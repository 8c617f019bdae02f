"""From raw files to curves by source: clean, prepare, a mixture with an annealing phase, fit (docs/mixtures.md)."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from recipe_runs import curve, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

pytestmark = pytest.mark.slow

T, BATCH, STEPS = 32, 10, 20
SMALL = f"""
model: {{n_layer: 1, n_head: 2, n_embd: 32, block_size: {T}}}
data:
  class_path: Mixture
  init_args:
    sources:
      web: {{path: shards/web}}
      code: {{path: shards/code}}
      books: {{path: shards/books, max_epochs: 4}}
    phases:
    - {{until: 0.8, weights: {{web: 80, code: 10, books: 10}}}}
    - {{until: 1.0, weights: {{web: 20, code: 40, books: 40}}}}
    micro_batch_size: 5
    global_batch_size: {BATCH}
schedule: {{class_path: WSD, init_args: {{warmup_steps: 2, decay_fraction: 0.2}}}}
trainer: {{max_steps: {STEPS}, log_every_n_steps: 1, accelerator: cpu}}
"""
WORDS = {
    "web": "river stone cloud letter garden window morning street paper voice",
    "code": "def return import class self lambda yield print range assert",
    "books": "whale captain harpoon deck storm sailor island voyage anchor mast",
}


def documents(name: str, number: int) -> list[str]:
    draw = random.Random(name)
    return [f"{' '.join(draw.choices(WORDS[name].split(), k=60))} {i}." for i in range(number)]


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """JSONL with 20 documents twice, compressed JSONL, and Parquet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    Path("raw").mkdir()
    web = documents("web", 120)
    Path("raw/web.jsonl").write_text(lines(web + web[:20]))
    Path("raw/code.jsonl.gz").write_bytes(gzip.compress(lines(documents("code", 60)).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents("books", 12)}), "raw/books.parquet")
    Path("small.yaml").write_text(SMALL)
    return tmp_path


def done(capsys, *words: str) -> str:
    code, out, err = run(capsys, *words)
    assert code == 0, err
    return out


def test_three_sources_become_a_mixture_with_curves_of_their_own(raw, capsys):
    for file in ("web.jsonl", "code.jsonl.gz", "books.parquet"):
        name = file.partition(".")[0]
        words = ["clean", "--data.paths", f"raw/{file}", "--normalise", "true", "--exact_duplicates", "true"]
        out = done(capsys, *words, "--out", f"clean/{name}")
        assert ("exact_duplicates" in out) and (re.search(r"exact_duplicates\s+-20", out) is not None) == (name == "web")
    tokenizer = ["BPE", "--data.tokenizer.vocab_size", "320"]
    manifests = {}
    for name in WORDS:
        words = ["prepare", "--data", "TextFiles", "--data.paths", f"clean/{name}", "--data.tokenizer", *tokenizer]
        done(capsys, *words, "--data.val_fraction", "0.3", "--out", f"shards/{name}")
        manifests[name] = json.loads(Path(f"shards/{name}/meta.json").read_text())["splits"]
        tokenizer = ["TokenizerJSON", "--data.tokenizer.path", "shards/web/tokenizer.json"]
    assert sum(split["documents"] for split in manifests["web"].values()) == 120

    recipe = ["--config", "small.yaml"]
    phases = json.loads(done(capsys, "plan", *recipe, "--json"))["settings"]["data"]["phases"]
    # 80 % of 200 samples in one period of 10, and the rest in periods of 5: 128, 16 and 16, then 8, 16 and 16
    drawn = [{name: of["tokens"] // T for name, of in phase["sources"].items()} for phase in phases]
    assert drawn == [{"web": 128, "code": 16, "books": 16}, {"web": 8, "code": 16, "books": 16}]
    blocks = (manifests["books"]["train"]["tokens"] - 1) // T
    assert phases[-1]["sources"]["books"]["epochs"] == pytest.approx(32 / blocks)

    # A limit that the run would break ends it before anything is trained.
    code, out, err = run(capsys, "fit", *recipe, "--run_dir", "runs/broken", "--data.sources.books.max_epochs", "0.1")
    assert code == 2 and "source books" in err and "--data.sources.books.max_epochs" in err and not Path("runs").exists()

    out = done(capsys, "fit", *recipe, "--run_dir", "runs/mixed")
    folder = Path("runs/mixed")
    for name in WORDS:
        logged = curve(folder, f"train/{name}/loss")
        assert min(logged) >= 1 and max(logged) == STEPS
        assert list(curve(folder, f"val/{name}/loss")) == [STEPS]
        assert f"val/{name}/loss" in out  # in the last table
    # Every period of 10 samples has 8 of "web": each step of the first phase. In the second, 2 periods of 5 have 2.
    whole = curve(folder, "train/loss")
    counts = {step: (8, 1, 1) if step <= 16 else (2, 4, 4) for step in whole}
    for step, shares in counts.items():
        parts = [share * curve(folder, f"train/{name}/loss")[step] for share, name in zip(shares, WORDS, strict=True)]
        assert sum(parts) / BATCH == pytest.approx(whole[step], rel=1e-6)
    # Every held-out token except the first of each source is predicted once.
    tokens = {name: manifests[name]["val"]["tokens"] - 1 for name in WORDS}
    mean = sum(tokens[name] * curve(folder, f"val/{name}/loss")[STEPS] for name in WORDS) / sum(tokens.values())
    assert mean == pytest.approx(curve(folder, "val/loss")[STEPS], rel=1e-6)

    events = EventAccumulator(str(folder)).Reload()
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    for title, prefix in (("training loss by source", "train"), ("validation loss by source", "val")):
        shown = [tag for tag in events.Tags()["scalars"] if any(re.match(pattern, tag) for pattern in charts[title])]
        assert sorted(shown) == sorted(f"{prefix}/{name}/loss" for name in WORDS)

    evaluated = done(capsys, "validate", "--run", "runs/mixed")
    for name in WORDS:
        assert f"{curve(folder, f'val/{name}/loss')[STEPS]:.4f}" in evaluated
