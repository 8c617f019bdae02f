"""A text with which two encoders are compared: what the text of one corpus may lack."""

from __future__ import annotations

_LONG = 2**15  # far longer than any word

_LINES = (
    "It's WE'LL they've I'D you're 'tis rock'n'roll o'S 's's ’s",  # contractions, in each case
    "  two  three   four    spaces \t tabs\t\tand \u00a0 others\u2003\u3000\u200b \v\f\x1c\x85",
    "trailing space \ntrailing tab\t\n\n\n  indented\r\nCRLF\r\n\r\nCR\ralone\u2028separator\u2029",
    "1 12 123 1234 12345.678,9 0x1F ½ Ⅷ ²³ ١٢٣ १२३ 1e-5 v2.0.1",
    "snake_case camelCase SCREAMING x.y->z(a[b]) {c:d}; //!? #include <a> === ...... ---- \\n $1 100%",
    "naïve café e\u0301 a\u0308\u0323 ﬁ Å Å İi ẞß Straße",  # composed and decomposed letters
    "Ελληνικά русский עברית العربية हिन्दी ไทย 中文字符 日本語テキスト 한국어 ᄒ\u1161ᆫ 𝔘𝔫𝔦 𠀀𪜀",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪🇫🇷 ☃️ ©®™ \ufeff \ufffd\ufffd \u0000\u0001\u007f",
)


def check_texts() -> list[str]:
    """The texts: lines of many kinds, characters of every block, and long runs of one kind."""
    lines = "\n".join(_LINES)
    codes = [code for code in (*range(0x20, 0x32000, 29), *range(0xE0000, 0xE0200, 7)) if not 0xD800 <= code < 0xE000]
    between = ("", " ", "a", "1", "\n", "'", "  ")
    blocks = "".join(chr(code) + between[i % len(between)] for i, code in enumerate(codes))
    runs = ["a" * _LONG, " " * _LONG + "x", "ab" * 1000 + " " * 1000 + "\n" * 1000 + "=" * 1000 + "7" * 1000 + "語" * 1000]
    return [lines, lines[::-1], blocks, *runs]
