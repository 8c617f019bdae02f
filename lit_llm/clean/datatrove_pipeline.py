"""Run the rules and the search for duplicates as a pipeline of the package datatrove, on this machine, Slurm or Ray. A repeated
command continues, because datatrove skips complete tasks.

Files are read and written as in ``clean_pipeline``. datatrove keeps one document of each cluster of near-duplicates. Two
documents are in the same cluster if they share a bucket, that is, the hashes of one band of their MinHash signatures, or if a
chain of such documents links them. Whole signatures are not compared.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.duplicates import plain
from lit_llm.clean.personal_data import EMAIL
from lit_llm.clean.quality import QUALITY_RULES, Quality, word_tokenizer
from lit_llm.clean.rules import documents_of
from lit_llm.clean.word_ngrams import SEED, bands_of, words
from lit_llm.core.disk import complete_file, read_text, write_text
from lit_llm.core.errors import UserError, library_errors, need
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.readers import DocumentReader

WORK = ".datatrove"
"""The folder in the output for datatrove's intermediate files and logs. It is hidden, so that no command reads it as text."""

_EXECUTORS = {"local": "LocalPipelineExecutor", "slurm": "SlurmPipelineExecutor", "ray": "RayPipelineExecutor"}
_MOST_MISSED = 0.5
"""The largest share of the document pairs with a similarity equal to the threshold that may be missed, because both documents
share no bucket. Fewer hashes in a bucket would miss fewer pairs, but would join many pairs that are less similar."""
_LACKING = {
    "normalise": "datatrove has no such step",
    "secrets": "datatrove has no such step",
    "against": "datatrove compares with the tasks of lighteval only",
    "languages": "datatrove has another model, which it downloads",
}

Pipeline = list[Any]


def executor_problems(settings: CleanSettings) -> list[str]:
    """One sentence for each setting that datatrove or its executor does not support."""
    name = settings.executor
    if name not in _EXECUTORS:
        return [f"executor is {name!r}, but must be one of {', '.join(_EXECUTORS)} (--executor)."]
    lacking = {step: why for step, why in _LACKING.items() if getattr(settings, step)}
    if settings.emails == "remove":
        lacking["emails"] = "datatrove replaces addresses only: use redact"
    problems = [
        f"{step} does not run with --executor, {why}. Clean without --executor first, or leave it out (--{step})."
        for step, why in lacking.items()
    ]
    try:
        inspect.signature(_executor_class(name)).bind(
            [], tasks=1, workers=1, logging_dir="", depends=None, **_arguments(settings)
        )
    except (TypeError, ValueError) as error:
        problems.append(f"executor {name}: {error} (--executor_args).")
    return problems


def run_with_datatrove(inputs: Sequence[Input], settings: CleanSettings, out: Path) -> None:
    """Run datatrove's pipeline, or submit its tasks to the cluster. Each task writes a file ``part-00000.jsonl``, … in ``out``.

    Raises:
        UserError: A source cannot be read as text, a package is not installed, or ``out`` has content of another command.
    """
    work = out / WORK
    settled = json.dumps([asdict(settings) | {"workers": 0}, [one.identity() for one in inputs]])
    begun = work / "settings.json"
    if out.exists() and any(out.iterdir()) and not (begun.is_file() and read_text(begun) == settled):
        raise UserError(f"{out} exists already, and not from this command: give another name (--out).")
    work.mkdir(parents=True, exist_ok=True)
    write_text(begun, settled)
    with library_errors("datatrove cannot run the pipeline"):
        _last_stage(inputs, settings, out, work).run()


def _last_stage(inputs: Sequence[Input], settings: CleanSettings, out: Path, work: Path) -> Any:
    """Make the datatrove executors of all stages, and return the last executor, which runs the earlier stages first."""
    tasks = min(settings.tasks, len(inputs))
    stage: Any = None

    def run(name: str, pipeline: Pipeline, count: int = tasks) -> None:
        nonlocal stage
        logs = {"logging_dir": str(work / "logs" / name)}
        if settings.executor == "slurm":
            logs["slurm_logs_folder"] = str(work / "slurm" / name)
        make = _executor_class(str(settings.executor))
        stage = make(pipeline, tasks=count, workers=settings.workers, depends=stage, **logs | _arguments(settings))

    reading: Pipeline = [partial(_read_sources, list(inputs)), *_filters(settings)]
    if settings.exact_duplicates or settings.near_duplicates is not None:
        run("filter", [*reading, partial(_write, work / "filtered")])
        reading = [partial(_read_lines, work / "filtered")]
    hashing = need("datatrove.utils.hashing", what="executor").HashConfig(hash_fc="sha1")  # the other needs xxhash < 4
    if settings.exact_duplicates:
        exact = need("datatrove.pipeline.dedup.exact_dedup", what="exact_duplicates")
        hashes, repeated = work / "hashes", work / "repeated"
        repeated.mkdir(exist_ok=True)
        config = exact.ExactDedupConfig(content_getter=_plain_text, hash_config=hashing)
        run("hash", [*reading, exact.ExactDedupSignature(str(hashes), config=config)])
        run("repeated", [exact.ExactFindDedups(str(hashes), str(repeated), config=config)], 1)
        reading.append(exact.ExactDedupFilter(str(repeated), config=config))
    if settings.near_duplicates is not None:
        dedup = need("datatrove.pipeline.dedup", what="near_duplicates")
        minhash = need("datatrove.pipeline.dedup.minhash", what="near_duplicates")
        norm = need("datatrove.utils.text", what="near_duplicates").TextNormConfig
        buckets, rows = bands_of(settings.near_duplicates, settings.near_permutations, most_missed=_MOST_MISSED)
        config = minhash.MinhashConfig(
            n_grams=settings.near_ngram,
            num_buckets=buckets,
            hashes_per_bucket=rows,
            seed=SEED,
            norm_config=norm(remove_punctuation=False, norm_unicode_diacritics=False, norm_numbers=False),
            hash_config=hashing,
        )
        signatures, pairs, remove = (str(work / name) for name in ("signatures", "pairs", "remove"))
        run("sign", [*reading, dedup.MinhashDedupSignature(signatures, config=config, language=word_tokenizer(words))])
        run("pairs", [dedup.MinhashDedupBuckets(signatures, pairs, config=config)], buckets)
        run("clusters", [dedup.MinhashDedupCluster(pairs, remove, config=config)], 1)
        reading.append(dedup.MinhashDedupFilter(remove))
    run("write", [*reading, partial(_write, out)])
    return stage


def _filters(settings: CleanSettings) -> Pipeline:
    """The steps of datatrove's pipeline that change or filter single documents."""
    filters: Pipeline = []
    if settings.fix_encoding:
        others = ("unescape_html", "remove_terminal_escapes", "fix_surrogates", "remove_control_chars")
        ftfy = need("datatrove.pipeline.formatters.ftfy", what="fix_encoding").FTFYFormatter
        filters.append(ftfy(**dict.fromkeys(others, False)))
    if settings.emails:
        pii = need("datatrove.pipeline.formatters.pii", what="emails").PIIFormatter
        filters.append(pii(remove_ips=False, email_replacement=EMAIL))
    return filters + [Quality(name).filter for name in QUALITY_RULES if getattr(settings, name)]


def _executor_class(name: str) -> Callable[..., Any]:
    return getattr(need(f"datatrove.executor.{name}", what=f"executor {name}"), _EXECUTORS[name])


def _arguments(settings: CleanSettings) -> dict[str, Any]:
    """The executor's arguments in the settings, as name → value: whole numbers as int, all other values as text."""
    pairs = (one.partition("=") for one in settings.executor_args)
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def _plain_text(document: Any) -> str:
    return plain(document.text)


def _read_sources(inputs: list[Input], data: object, rank: int, world_size: int) -> Iterator[Any]:
    """Yield the documents of every ``world_size``-th source, from number ``rank`` on, as documents of datatrove."""
    new = need("datatrove.data", what="executor").Document
    for one in inputs[rank::world_size]:
        with DocumentReader(one.source, one.settings) as reader:
            for document in documents_of(reader, name=one.source.name):
                yield new(text=document.text, id=document.source)


def _read_lines(folder: Path, data: object, rank: int, world_size: int) -> Iterator[Any]:
    """Yield the documents that `_write` wrote into ``folder`` in an earlier stage, in the task of the same ``rank``."""
    new = need("datatrove.data", what="executor").Document
    with open(_part(folder, rank), encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            yield new(text=record["text"], id=record["source"])


def _write(folder: Path, data: Iterable[Any], rank: int, world_size: int) -> None:
    """Write the documents ``data`` of task ``rank`` as JSONL to part-RANK.jsonl in ``folder``, complete or not at all."""
    folder.mkdir(exist_ok=True)
    path = _part(folder, rank)
    with complete_file(path, path.with_suffix(".tmp")) as file:
        for document in data:
            line = json.dumps({"text": document.text, "source": document.id}, ensure_ascii=False)
            file.write(line.encode() + b"\n")


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.jsonl"
