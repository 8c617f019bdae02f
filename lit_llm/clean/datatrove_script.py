"""A script for datatrove that finds near-duplicates on a cluster, with the words, n-grams and signature size of `clean`."""

from __future__ import annotations

from pathlib import Path

from lit_llm.clean.word_ngrams import SEED, WORD_PATTERN, bands_of

_SCRIPT = '''"""Keep one document of each cluster of near-duplicates, with datatrove: pip install 'datatrove[io,processing]'

Documents that share a bucket are in one cluster, and so are those that are linked by others. At the similarity {threshold},
two documents share one in {shared:.0%} of cases: {buckets} buckets of {hashes} hashes, n-grams of {ngram} words.
Run it again to continue after an interruption. For Slurm, return a SlurmPipelineExecutor from `executor`.
"""

import argparse
import re

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

DOCUMENTS = {documents!r}
WORK = {work!r}
OUT = {out!r}
CONFIG = MinhashConfig(
    n_grams={ngram},
    num_buckets={buckets},
    hashes_per_bucket={hashes},
    seed={seed},
    norm_config=TextNormConfig(remove_punctuation=False, norm_unicode_diacritics=False, norm_numbers=False),
)
WORD = re.compile({pattern!r})


class Words(WordTokenizer):
    """The words that `clean` compares."""

    def word_tokenize(self, text):
        return WORD.findall(text)

    def sent_tokenize(self, text):
        return [text]

    def span_tokenize(self, text):
        return [(0, len(text))]


def reader():
    return JsonlReader(DOCUMENTS, glob_pattern="part-*.jsonl", add_file_path=False)


def line(writer, document):
    return {{"text": document.text, **document.metadata}}


def executor(name, pipeline, tasks, workers, depends=None):
    return LocalPipelineExecutor(
        pipeline, tasks=tasks, workers=workers, logging_dir=f"{{WORK}}/logs/{{name}}", depends=depends
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1, help="at most the number of files")
    parser.add_argument("--workers", type=int, default=1)
    own = parser.parse_args()
    sign = MinhashDedupSignature(f"{{WORK}}/signatures", config=CONFIG, language=Words())
    pairs = MinhashDedupBuckets(f"{{WORK}}/signatures", f"{{WORK}}/pairs", config=CONFIG)
    clusters = MinhashDedupCluster(f"{{WORK}}/pairs", f"{{WORK}}/remove", config=CONFIG)
    keep = MinhashDedupFilter(f"{{WORK}}/remove")
    write = JsonlWriter(OUT, output_filename="part-${{rank}}.jsonl", compression=None, adapter=line)
    first = executor("1-sign", [reader(), sign], own.tasks, own.workers)
    second = executor("2-pairs", [pairs], CONFIG.num_buckets, own.workers, first)
    third = executor("3-clusters", [clusters], 1, 1, second)
    executor("4-write", [reader(), keep, write], own.tasks, own.workers, third).run()


if __name__ == "__main__":
    main()
'''


def datatrove_script(documents: Path, *, threshold: float, ngram: int, permutations: int) -> str:
    """The text of the script.

    Args:
        documents: the folder that `clean` writes.
        threshold: the similarity at which half of all pairs share a bucket, or a little more.
        permutations: hashes of a document, at most.
    """
    # datatrove does not compare the signatures of a pair that shares a bucket. With fewer hashes in a bucket, it would miss
    # fewer pairs at the threshold, and join many that are less similar.
    buckets, hashes = bands_of(threshold, permutations, most_missed=0.5)
    return _SCRIPT.format(
        documents=str(documents),
        work=f"{documents}-datatrove",
        out=f"{documents}-deduplicated",
        threshold=threshold,
        shared=1 - (1 - threshold**hashes) ** buckets,
        buckets=buckets,
        hashes=hashes,
        ngram=ngram,
        seed=SEED,
        pattern=WORD_PATTERN,
    )
