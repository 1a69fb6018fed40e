"""Text to token ids and back, by tokenizer.json and tokenizer_config.json.

Thread-safe: only a cache changes. `tokenizers` releases the GIL for batches only (0.23: `encode` of
3 MB holds it for 2 s, `encode_batch_fast` for 20 ms), so a text is a batch of one.
"""

import codecs
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers

from engine.gguf.tokenizer import gguf_tokenizer
from engine.model_files.directory import TOKENIZER, GGUFFolder, ModelDirectory, content_of, open_directory
from service.flags import ConfigError

# ---- Bounds characters per token, to reject texts that cannot fit a context.

_COMPOSED = 4  # maximum characters that NFC and NFKC compose to one (UAX 15)
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation")
_INNER = range(0x80, 0xC0)  # UTF-8 continuation bytes
_NO_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


_PIECE_CHARS = 1 << 20  # scanned per call


class LongestToken(NamedTuple):
    """`chars`: maximum per token. `free`: possibly without a token, such as spaces."""

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
    """`tokenizer`: tokenizer.json. `letters`: bytes of byte-level vocabularies.

    None if the tokenizer may drop characters or merge any number into one unknown token.
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


_TEXT = -1  # stands for texts between special tokens
LONG_IDS = 1024  # at least this many ids: decode with the GIL released


class TooManyTokens(Exception):
    """A text exceeds the allowed tokens."""


class Tokenizer:
    """`config`: `ModelDirectory.tokenizer_config`."""

    def __init__(self, backend: tokenizers.Tokenizer, *, config: Mapping[str, Any] | None = None) -> None:
        self.backend = backend
        self.config = config or {}
        self._bos_id, self._eos_id = self._added_id("bos_token"), self._added_id("eos_token")
        description = json.loads(backend.to_str())
        self.byte_level = _is_byte_level(description)
        self.longest = longest_token(description, _BYTE_OF_CHAR)  # None: no bound
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        backend.no_truncation()
        backend.no_padding()
        self.token_text = lru_cache(maxsize=1 << 18)(self._token_text)
        names = sorted((self.token_text(i) for i in self.special_ids), key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names)))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, str]:
        return _special_tokens(self.config)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Raises ValueError for invalid Unicode, TooManyTokens above `most`."""
        try:
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise ValueError("text is not valid Unicode") from None
        if most is not None and len(encoding) > most:
            raise TooManyTokens(f"{len(encoding)} tokens")
        ids: list[int] = encoding.ids
        return self._with_ends(ids) if add_special_tokens else ids

    @cached_property
    def pair_marks(self) -> tuple[list[int], list[int], list[int]]:
        """Special tokens before, between and after a pair of texts."""
        texts = (self.token_text(i) for i in range(self.vocab_size) if i not in self.special_ids)
        text = next(text for text in texts if self.backend.encode(text, add_special_tokens=False).ids)
        encoding = self.backend.encode(text, text)
        sides = encoding.sequence_ids  # None for a special token
        end, begin = len(sides) - sides[::-1].index(0), sides.index(1)
        before, between = encoding.ids[: sides.index(0)], encoding.ids[end:begin]
        behind = encoding.ids[len(sides) - sides[::-1].index(1) :]
        whole = self._with_ends([*before, _TEXT, *behind])
        return whole[: whole.index(_TEXT)], between, whole[whole.index(_TEXT) + 1 :]

    def check_length(self, text: str, most: int) -> None:
        """Raise TooManyTokens if the characters already exceed `most`."""
        if self.longest is not None and self.longest.is_over(text, most):
            raise TooManyTokens(f"more than {most} tokens (it is {len(text)} characters long)")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary (padded models) have no text."""
        if len(ids) >= LONG_IDS:
            return str(self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token in running text, perhaps part of a character."""
        token = self.backend.id_to_token(token_id) or ""
        if token_id not in self.special_ids:
            if self.byte_level and all(c in _BYTE_OF_CHAR for c in token):
                return bytes(_BYTE_OF_CHAR[c] for c in token)
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
        return self.token_text(token_id).encode()

    def names(self, ids: list[int]) -> list[str]:
        """Vocabulary entries, as `convert_ids_to_tokens` of transformers."""
        return [self.backend.id_to_token(i) or "" for i in ids]

    def is_special(self, text: str) -> bool:
        return self.backend.token_to_id(text) in self.special_ids

    def without_special(self, text: str) -> str:
        return self._special_names.sub("", text) if self.special_ids else text

    def num_open_bytes(self, ids: list[int], *, skip_special_tokens: bool = True) -> int:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if not (skip_special_tokens and i in self.special_ids):
                decoder.decode(self.token_bytes(i))
        return len(decoder.getstate()[0])

    def _token_text(self, token_id: int) -> str:
        """Text of one token with its leading space; special tokens by name."""
        if token_id in self.special_ids:
            return str(self.backend.id_to_token(token_id))
        alone = self.decode([token_id], skip_special_tokens=False)
        if self.byte_level:
            return alone
        # Word-level and SentencePiece decoders drop the first space: decode the token twice.
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]

    def _with_ends(self, ids: list[int]) -> list[int]:
        before = [self._bos_id] if self._bos_id is not None and ids[:1] != [self._bos_id] else []
        behind = [self._eos_id] if self._eos_id is not None and ids[-1:] != [self._eos_id] else []
        return [*before, *ids, *behind] if before or behind else ids

    def _added_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name) if self.config.get(f"add_{name}") is True else None
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(model: str | Path | ModelDirectory) -> Tokenizer:
    """tokenizer.json is required, except in GGUF. Raises ConfigError of one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text is one unit of work; other cores have their own
    folder = open_directory(model)
    if isinstance(folder, GGUFFolder):
        return Tokenizer(gguf_tokenizer(folder.file), config=folder.tokenizer_config)
    file = folder.path / TOKENIZER
    if not file.is_file():
        raise ConfigError(
            f"--model-path {folder.path}: no tokenizer.json there; give --skip-tokenizer-init to send and read token ids, or "
            "convert an older tokenizer with transformers' save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises Exception for a broken file
        raise ConfigError(f"{file}: not a tokenizer that can be read ({_one_line(e)})") from None
    _add_tokens(backend, folder)
    return Tokenizer(backend, config=folder.tokenizer_config)


def _add_tokens(backend: tokenizers.Tokenizer, folder: ModelDirectory) -> None:
    for id, token in folder.added_tokens.items():
        if backend.token_to_id(token.content) is not None or id == backend.get_vocab_size():
            backend.add_tokens([tokenizers.AddedToken(**msgspec.to_builtins(token))])
    config = folder.tokenizer_config
    lists = [config.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    unnamed = (content_of(token) for tokens in lists if isinstance(tokens, list) for token in tokens)
    special = [*_special_tokens(config).values(), *unnamed]
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([known.get(text, text) for text in special if backend.token_to_id(text) is not None])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, dict) else {})}
    texts = {name: content_of(token) for name, token in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text}


def _is_byte_level(description: dict[str, Any]) -> bool:
    decoder = description.get("decoder") or {}
    return any(d.get("type") == "ByteLevel" for d in [decoder, *decoder.get("decoders", [])])


def _one_line(e: BaseException) -> str:
    return str(e).splitlines()[0][:200] if str(e) else type(e).__name__


def _byte_alphabet() -> dict[str, int]:
    """Byte of each letter: `bytes_to_unicode` of openai/gpt-2, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
