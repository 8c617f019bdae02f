"""Keep documents of some languages, as py3langid identifies them. It ships its model, so nothing is downloaded."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need, refuse

_PARTS, _PART = 4, 1000  # of a long document, four parts of 1,000 characters are read
# English names of the languages that py3langid knows, to answer a name or a misspelled code.
_NAMES = {
    "ace": "Acehnese", "af": "Afrikaans", "am": "Amharic", "an": "Aragonese", "ar": "Arabic", "ary": "Moroccan Arabic",
    "arz": "Egyptian Arabic", "as": "Assamese", "az": "Azerbaijani", "ba": "Bashkir", "bcl": "Central Bikol",
    "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali", "br": "Breton", "bs": "Bosnian", "ca": "Catalan",
    "crh": "Crimean Tatar", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "dz": "Dzongkha", "el": "Greek",
    "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque", "ext": "Extremaduran",
    "fa": "Persian", "fi": "Finnish", "fo": "Faroese", "fr": "French", "fuv": "Nigerian Fulfulde", "fy": "Frisian",
    "ga": "Irish", "gcf": "Guadeloupean Creole", "gcr": "Guianese Creole", "gd": "Scottish Gaelic", "gl": "Galician",
    "gom": "Goan Konkani", "grc": "Ancient Greek", "gu": "Gujarati", "gug": "Guarani", "guw": "Gun", "ha": "Hausa",
    "hbo": "Ancient Hebrew", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "ht": "Haitian Creole", "hu": "Hungarian",
    "hy": "Armenian", "id": "Indonesian", "ig": "Igbo", "is": "Icelandic", "it": "Italian", "ja": "Japanese",
    "jv": "Javanese", "ka": "Georgian", "kab": "Kabyle", "kik": "Kikuyu", "kk": "Kazakh", "km": "Khmer", "kn": "Kannada",
    "ko": "Korean", "ku": "Kurdish", "ky": "Kyrgyz", "la": "Latin", "lb": "Luxembourgish", "lg": "Ganda",
    "lij": "Ligurian", "ln": "Lingala", "lo": "Lao", "lt": "Lithuanian", "ltg": "Latgalian", "lv": "Latvian",
    "mg": "Malagasy", "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay",
    "mt": "Maltese", "my": "Burmese", "ne": "Nepali", "nl": "Dutch", "nn": "Norwegian Nynorsk", "no": "Norwegian",
    "nso": "Northern Sotho", "oc": "Occitan", "om": "Oromo", "or": "Odia", "pa": "Punjabi", "pcm": "Nigerian Pidgin",
    "pl": "Polish", "ps": "Pashto", "pt": "Portuguese", "qu": "Quechua", "ro": "Romanian", "ru": "Russian",
    "rw": "Kinyarwanda", "sa": "Sanskrit", "sdh": "Southern Kurdish", "se": "Northern Sami", "si": "Sinhala",
    "sk": "Slovak", "sl": "Slovenian", "sn": "Shona", "so": "Somali", "sq": "Albanian", "sr": "Serbian", "st": "Sotho",
    "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "tg": "Tajik", "th": "Thai", "tk": "Turkmen",
    "tl": "Tagalog", "tr": "Turkish", "tt": "Tatar", "ug": "Uyghur", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek",
    "uzs": "Southern Uzbek", "vec": "Venetian", "vi": "Vietnamese", "vo": "Volapük", "wa": "Walloon", "wuu": "Wu Chinese",
    "xh": "Xhosa", "yo": "Yoruba", "yue": "Cantonese", "zh": "Chinese", "zu": "Zulu", "zxx": "no language",
}  # fmt: skip


@dataclass
class Language:
    """A rule that keeps documents of ``languages``.

    Args:
        languages: ISO 639 codes, such as "en".
        confidence: the smallest probability of the language, between 0 and 1.

    Raises:
        UserError: The package py3langid is not installed, or does not know a language; one sentence for each.
    """

    languages: Sequence[str]
    confidence: float

    def __post_init__(self) -> None:
        refuse(_unknown(self.languages))
        self._identifier = identifier()

    def __call__(self, text: str) -> str | Removed:
        language, confidence = self._identifier.classify(_sample(text))
        if language in self.languages and confidence >= self.confidence:
            return text
        name = language if language not in self.languages else "uncertain"
        return Removed(f"languages/{name}", f"{language} with probability {confidence:.2f}")


def _unknown(given: Iterable[str]) -> Iterator[str]:
    """A sentence about each language that py3langid does not know, with the nearest codes."""
    known = sorted(identifier().labels)
    codes = {code: code for code in known} | {_NAMES[code].lower(): code for code in known if code in _NAMES}
    for language in sorted(set(given) - set(known)):
        word = language.lower().replace("_", "-").partition("-")[0]  # without a region: en_US
        if word in codes:
            yield f"Language {language!r} is not known: give its code, {codes[word]} (--languages)."
            continue
        near = dict.fromkeys(codes[one] for one in difflib.get_close_matches(word, codes, n=3, cutoff=0.5) or ["en"])
        shown = " or ".join(f"{code} ({_NAMES[code]})" if code in _NAMES else code for code in near)
        yield f"Language {language!r} is not known: give an ISO 639 code, such as {shown} (--languages)."


@functools.cache
def identifier() -> Any:
    """py3langid's model, with probabilities instead of scores. It takes 80 MB, once a process.

    Raises:
        UserError: The package is not installed.
    """
    langid = need("py3langid.langid", what="languages")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _sample(text: str) -> str:
    """``text``, or of a long one its start, its end and two parts between, so that the time does not grow with it."""
    if len(text) <= _PARTS * _PART:
        return text
    last = len(text) - _PART
    starts = [last * i // (_PARTS - 1) for i in range(_PARTS)]
    return "\n".join(text[start : start + _PART] for start in starts)
