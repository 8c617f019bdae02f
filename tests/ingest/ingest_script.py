"""Tokenise a folder, in small jobs. Usage: ingest_script.py FOLDER OUT WORKERS"""

import sys
import unittest.mock
from pathlib import Path

from lit_llm.core.disk import delete
from lit_llm.ingest import inputs, shard_pipeline
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.paths import list_sources
from lit_llm.ingest.readers import ReadSettings
from lit_llm.ingest.shard_pipeline import ingest
from lit_llm.ingest.token_parts import PARTS
from lit_llm.tokenizers import load_tokenizer


def run(folder: Path, out: Path, workers: int, *, job_bytes: int = 20_000) -> None:
    """Every document decides by its text whether it is held out."""
    sources, problems = list_sources(str(folder), flag="FOLDER")
    assert not problems, problems
    out.mkdir(exist_ok=True)
    read = [Input(source, None, ReadSettings()) for source in sources if source.path.split("/")[-1] != "tokenizer.json"]
    tokenizer = load_tokenizer(folder.parent / "tokenizer.json")
    settings = {"shard_tokens": 20_000, "val_fraction": 0.1, "drop_near_duplicates": True}
    patch = unittest.mock.patch.object
    with patch(inputs, "JOB_BYTES", job_bytes), patch(shard_pipeline, "SHORT_BYTES", 0):
        ingest(read, tokenizer, out, workers=workers, **settings)
    delete(out / PARTS)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
