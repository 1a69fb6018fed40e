"""Bounds characters per token, to reject texts that cannot fit a context."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_COMPOSED = 4  # maximum characters that NFC and NFKC compose to one (UAX 15)
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation")
_INNER = range(0x80, 0xC0)  # UTF-8 continuation bytes
_NO_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


_PIECE_CHARS = 1 << 20  # scanned per call


class LongestToken(NamedTuple):
    """Limit of a token's length.

    `chars`: maximum per token. `free`: possibly without a token, such as spaces.
    """

    chars: int
    free: re.Pattern[str] | None

    def is_over(self, text: str, most: int) -> bool:
        """True if `text` surely has more than `most` tokens."""
        left = most * self.chars
        for start in range(0, len(text) if len(text) > left else 0, _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            left -= len(piece if self.free is None else self.free.sub("", piece))
            if left < 0:
                return True
        return False


def longest_token(tokenizer: Mapping[str, Any], letters: Mapping[str, int]) -> LongestToken | None:
    """Find the longest token of a tokenizer.

    `tokenizer`: tokenizer.json. `letters`: bytes of byte-level vocabularies. None if the tokenizer
    may drop characters or merge any number into one unknown token.
    """
    added = tokenizer.get("added_tokens") or []
    factor, lacking = _shrinks(tokenizer.get("normalizer")), _lacking(tokenizer, letters)
    if factor is None or lacking is None or not _keeps(tokenizer.get("pre_tokenizer")):
        return None
    free = r"\s" if any(token["lstrip"] or token["rstrip"] for token in added) else ""
    free += "".join(map(_chars_of, lacking))
    longest = max(map(len, (*tokenizer["model"]["vocab"], *(token["content"] for token in added))))
    return LongestToken(factor * longest, re.compile(f"[{free}]+") if free else None)


def _lacking(tokenizer: Mapping[str, Any], letters: Mapping[str, int]) -> list[int] | None:
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        return None
    steps = (*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer")))
    if model.get("byte_fallback"):
        lacking = [byte for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    elif any(step["type"] == "ByteLevel" for step in steps):
        lacking = [byte for letter, byte in letters.items() if letter not in model["vocab"]]
    else:
        return None
    return None if any(byte in _INNER for byte in lacking) else [byte for byte in lacking if byte not in _NO_UTF8]


def _chars_of(first: int) -> str:
    if first < 0x80:
        return f"\\x{first:02x}"
    bits, kept = (6, 0x1F) if first < 0xE0 else (12, 0x0F) if first < 0xF0 else (18, 0x07)
    begin = (first & kept) << bits
    return f"\\U{begin:08x}-\\U{min(begin + (1 << bits) - 1, 0x10FFFF):08x}"


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """Characters merged to one; None if some may be dropped."""
    factor = 1
    for step in _steps(normalizer):
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind == "Replace" and 0 < len(pattern.get("String", "")) <= len(step["content"]):
            continue
        if kind not in _NORMALIZERS:
            return None
        factor *= _NORMALIZERS[kind]
    return factor


def _keeps(splitter: Mapping[str, Any] | None) -> bool:
    return all(step["type"] in _SPLITTERS and step.get("behavior") != "Removed" for step in _steps(splitter))


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _steps(inner)
