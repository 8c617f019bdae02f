"""The quality rules of Gopher (Rae et al. 2021) and C4 (Raffel et al. 2020) for English text, as datatrove implements them.

Words are what whitespace separates. datatrove's own default counts punctuation marks as words. Then one word in five has no
letter in most technical documents, and Gopher's rule on letters removes 95 % of them (docs/evidence/clean.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need

_GRAMS = re.compile(r"(top|duplicated)_(\d+)_(?:n_)?grams?")

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)")


# datatrove names the rule only. Values are counted again with its own functions, for removed documents alone.
def gopher_quality_detail(limits: Any, reason: str, text: str) -> str:
    """
    Args:
        limits: datatrove's filter.
        reason: the rule, as the filter names it without "gopher_".
    """
    marks = need("datatrove.utils.text", what="gopher_quality").PUNCTUATION_SET
    words, lines = text.split(), text.splitlines()
    lengths = [len(word) for word in words if not marks.issuperset(word)]
    match reason:
        case "short_doc":
            return f"{len(lengths)} words, {limits.min_doc_words} at least"
        case "long_doc":
            return f"{len(lengths)} words, {limits.max_doc_words} at most"
        case "below_avg_threshold":
            return f"mean word length {sum(lengths) / len(lengths):.4g}, {limits.min_avg_word_length} at least"
        case "above_avg_threshold":
            return f"mean word length {sum(lengths) / len(lengths):.4g}, {limits.max_avg_word_length} at most"
        case "too_many_hashes":
            return f"{text.count('#') / len(words):.4g} # for each word, {limits.max_symbol_word_ratio} at most"
        case "too_many_ellipsis":
            count = text.count("...") + text.count("…")
            return f"{count / len(words):.4g} … for each word, {limits.max_symbol_word_ratio} at most"
        case "too_many_bullets":
            share = _share([line.lstrip().startswith(("•", "-")) for line in lines])
            return f"{share} of the lines start with a bullet, {limits.max_bullet_lines_ratio} at most"
        case "too_many_end_ellipsis":
            share = _share([line.rstrip().endswith(("...", "…")) for line in lines])
            return f"{share} of the lines end with an ellipsis, {limits.max_ellipsis_lines_ratio} at most"
        case "below_alpha_threshold":
            share = _share([any(map(str.isalpha, word)) for word in words])
            return f"{share} of the words have a letter, {limits.max_non_alpha_words_ratio} at least"
        case "enough_stop_words":
            return f"{len(limits.stop_words & set(words))} different stop words, {limits.min_stop_words} at least"
    return f"{len(words)} words"


def gopher_repetition_detail(limits: Any, reason: str, text: str) -> str:
    """See ``gopher_quality_detail``."""
    module = need("datatrove.pipeline.filters.gopher_repetition_filter", what="gopher_repetition")
    if found := _GRAMS.fullmatch(reason):
        n, words = int(found[2]), text.split()
        if found[1] == "top":
            size, limit = module.find_top_duplicate(module.get_n_grams(words, n)), dict(limits.top_n_grams)[n]
            return f"{size / len(text):.4g} of the characters are the most frequent {n}-gram, {limit} at most"
        size, limit = module.find_all_duplicate(words, n), dict(limits.dup_n_grams)[n]
        return f"{size / len(text):.4g} of the characters are in repeated {n}-grams, {limit} at most"
    if reason.startswith("dup_para_"):
        name, parts = "paragraphs", re.split(r"\n{2,}", text.strip())
    elif reason.startswith("dup_line_"):
        name, parts = "lines", re.split(r"\n+", text)
    else:
        return f"{len(text.split())} words"
    count, characters = module.find_duplicates(parts)
    limit = getattr(limits, reason)
    if reason.endswith("_char_frac"):
        return f"{characters / len(text):.4g} of the characters are in repeated {name}, {limit} at most"
    return f"{count / len(parts):.4g} of the {name} are repeated, {limit} at most"


def c4_detail(limits: Any, reason: str, text: str) -> str:
    """See ``gopher_quality_detail``."""
    if reason == "too_few_sentences":
        # The filter does not tell its number of sentences: count them in the lines that it would keep.
        kept = need("datatrove.data", what="c4").Document(text=text, id="")
        type(limits)(min_num_sentences=0, language=limits.language).filter(kept)
        sentences = need("datatrove.utils.text", what="c4").split_into_sentences
        count = sum(len(sentences(line, limits.language)) for line in kept.text.splitlines())
        return f"{count} sentences in the lines that end like sentences, {limits.min_num_sentences} at least"
    texts = {"lorem_ipsum": "has the words lorem ipsum", "curly_bracket": "has the character {"}
    return texts.get(reason, f"{len(text.split())} words")


def _share(found: Sequence[bool]) -> str:
    return f"{sum(found) / len(found):.4g}"


_FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter", gopher_quality_detail),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter", gopher_repetition_detail),
    "c4": ("c4_filters", "C4QualityFilter", c4_detail),
}
QUALITY_RULES = tuple(_FILTERS)


class Quality:
    """A rule of datatrove: it removes a document, and C4's also removes lines.

    Args:
        name: of ``QUALITY_RULES``.

    Raises:
        UserError: The package datatrove is not installed.
    """

    def __init__(self, name: str) -> None:
        module, cls, self._detail = _FILTERS[name]
        filters = need(f"datatrove.pipeline.filters.{module}", what=name)
        self._name, self._filter = name, getattr(filters, cls)(language=_words())
        self._document = need("datatrove.data", what=name).Document

    def __reduce__(self) -> tuple[type[Quality], tuple[str]]:
        return Quality, (self._name,)  # datatrove's objects need not be sent to a worker

    def __call__(self, text: str) -> str | Removed:
        if not text.strip():
            return Removed(f"{self._name}/empty", "no text")
        document = self._document(text=text, id="")
        verdict = self._filter.filter(document)
        if verdict is True:
            return str(document.text)
        reason = (verdict[1] if isinstance(verdict, tuple) else "removed").removeprefix("gopher_")
        return Removed(f"{self._name}/{reason}", self._detail(self._filter, reason, text))


def _words() -> Any:
    """How datatrove cuts text into words and sentences. Its other ways need models, or packages of 100 MB."""
    tokenizers = need("datatrove.utils.word_tokenizers", what="quality")

    class Words(tokenizers.WordTokenizer):  # type: ignore[name-defined]
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            ends = [match.end() for match in _SENTENCE_END.finditer(text)]
            if not ends or text[ends[-1] :].strip():
                ends.append(len(text))
            return list(zip([0, *ends], ends, strict=False))

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:stop].strip() for start, stop in self.span_tokenize(text)]

    return Words()
