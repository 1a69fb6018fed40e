"""The words of the shipped model and their ids: 16 specials, 256 keys, 256 values.

id  0 <pad>   1 <bos>   2 <eos>   3 <unk>   4 unseen   5..15 <reserved_n>   16.. k00..k255   272.. v00..v255
"""

from collections.abc import Iterable, Sequence

PAD, BOS, EOS, UNK, UNSEEN = range(5)
NUM_SPECIALS = 16
NUM_KEYS = 256
NUM_VALUES = 256
FIRST_KEY = NUM_SPECIALS
FIRST_VALUE = FIRST_KEY + NUM_KEYS

WORDS: tuple[str, ...] = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "unseen"),
    *(f"<reserved_{i}>" for i in range(5, NUM_SPECIALS)),
    *(f"k{i:02d}" for i in range(NUM_KEYS)),
    *(f"v{i:02d}" for i in range(NUM_VALUES)),
)
VOCAB_SIZE = len(WORDS)
HIDDEN_IN_TEXT = frozenset({PAD, BOS, EOS, UNK, *range(5, NUM_SPECIALS)})  # special tokens; `unseen` is a plain word

_ID_OF = {word: i for i, word in enumerate(WORDS)}


def key(i: int) -> int:
    assert 0 <= i < NUM_KEYS
    return FIRST_KEY + i


def value(i: int) -> int:
    assert 0 <= i < NUM_VALUES
    return FIRST_VALUE + i


def encode(text: str | Sequence[str]) -> list[int]:
    """As the tokenizer: <bos>, then the ids of the words."""
    words = text.split() if isinstance(text, str) else text
    return [BOS, *(_ID_OF.get(word, UNK) for word in words)]


def decode(ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """As the tokenizer: the words of `ids`, joined by spaces."""
    return " ".join(WORDS[i] for i in ids if not (skip_special_tokens and i in HIDDEN_IN_TEXT))
