"""How much text a token can stand for: never less than what it does stand for."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.text.tokenizer import Tokenizer, TooManyTokens
from tests.frontend.conftest import byte_tokenizer

LETTERS = pre_tokenizers.ByteLevel.alphabet()
SPACES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(*steps: Any) -> Any:
    """Splits, and then bytes."""
    return pre_tokenizers.Sequence([*steps, SPACES])


def byte_level(
    *, lacks: str = "", normalizer: Any = None, splitter: Any = SPACES, added: tuple[AddedToken, ...] = ()
) -> Tokenizer:
    """Bytes, and runs of eight spaces or of eight a."""
    vocab = {letter: i for i, letter in enumerate(sorted(set(LETTERS) - set(lacks)))}
    pairs = [(letter * size, letter * size) for size in (1, 2, 4) for letter in "Ġa"]
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = splitter
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return Tokenizer(backend)


def sentencepiece(*, fallback: bool = True, letter: str = "a", steps: tuple[Any, ...] = ()) -> Tokenizer:
    """Runs of eight of `letter`, with a space before it or none."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} if fallback else {"<unk>": 0}
    runs = [letter * size for size in (1, 2, 4)]
    for token in ("▁", *runs, letter * 8, "▁" + letter):
        vocab.setdefault(token, len(vocab))
    merges = [*((run, run) for run in runs), ("▁", letter)]
    unknown = None if fallback else "<unk>"
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=fallback, fuse_unk=True, unk_token=unknown))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), *steps])
    return Tokenizer(backend)


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer,
    "byte-level": byte_level,
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "nfkc-of-a-sequence": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFKC()])),
    "split": lambda: byte_level(splitter=_split(pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated"))),
    "lacks-controls": lambda: byte_level(lacks=chr(256 + 4) + chr(256 + 6)),
    "lacks-far-planes": lambda: byte_level(lacks="ñòé"),  # letters of the bytes F1, F2 and E9
    "takes-spaces": lambda: byte_level(added=(AddedToken("<m>", lstrip=True), AddedToken("<n>", rstrip=True))),
    "byte-fallback": sentencepiece,
    "composed": lambda: sentencepiece(letter="\u1f82", steps=(normalizers.NFC(),)),  # of four characters
}
UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "unknown-characters": lambda: sentencepiece(fallback=False),
    "words": lambda: Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
    "strips": lambda: byte_level(normalizer=normalizers.Strip()),
    "replaces-a-pattern": lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "removes": lambda: byte_level(splitter=_split(pre_tokenizers.Split(" ", behavior="removed"))),
    "lacks-inner-bytes": lambda: byte_level(lacks="¢"),  # the letter of the byte A2
    "whitespace": lambda: byte_level(splitter=_split(pre_tokenizers.WhitespaceSplit())),
}
PIECES = (
    *(" " * 9, "a" * 9, "<m>", "<n>", "<s>", "\n\t \r", "\x04", "\x06\x04", "e\u0301", "\u03b1\u0313\u0300\u0345", "ﬁ"),
    *("é鬱", "\U00050000", "\U00090000", "\ud55c", "\u1112\u1161\u11ab", "\u00a0\u2003", "日本", "x"),
)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_text_never_has_fewer_tokens_than_its_length_says(kind: str) -> None:
    tokenizer, rng = KNOWN[kind](), random.Random(7)
    assert tokenizer.longest is not None
    drawn = ("".join(rng.choice(PIECES) * rng.randint(1, 9) for _ in range(rng.randint(1, 9))) for _ in range(300))
    for text in (*(piece * 8 for piece in PIECES), *drawn):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        assert not tokenizer.longest.is_over(text, count), text
    assert tokenizer.longest.is_over("x" * 4000, 60), "a text that cannot fit"


@pytest.mark.parametrize("kind", UNKNOWN)
def test_tokenizers_that_leave_characters_out_have_no_such_bound(kind: str) -> None:
    tokenizer = UNKNOWN[kind]()
    assert tokenizer.longest is None
    tokenizer.check_length("x" * 10_000, 1)


def test_a_text_of_too_many_tokens_says_how_many() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(TooManyTokens, match=r"^7 tokens$"):
        tokenizer.encode("abcdef", most=6)
    assert len(tokenizer.encode("abcdef", most=7)) == 7
    with pytest.raises(TooManyTokens, match=r"^more than 2 tokens \(it is 7 characters long\)$"):
        tokenizer.check_length("abcdefg", 2)
    tokenizer.check_length("abcdef", 2)
