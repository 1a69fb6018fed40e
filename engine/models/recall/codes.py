"""One sign code per word: 528 words of 48 signs, any two nearly orthogonal. Pure Python, the same on every machine."""

import random

CODE_DIMS = 48
MAX_OVERLAP = 16  # |dot| of two codes, of 48: similarity at most 1/3


def sign_codes(count: int, *, seed: int = 0) -> list[list[int]]:
    """[count][CODE_DIMS] of +1 and -1: random codes, each kept if it is far enough from all before it.

    Signs because they are exact in bf16. `getrandbits` is stable over Python versions.
    """
    bits = random.Random(seed).getrandbits
    words: list[int] = []
    while len(words) < count:
        word = bits(CODE_DIMS)
        if _is_far(word, words):
            words.append(word)
    return [[1 if word >> bit & 1 else -1 for bit in range(CODE_DIMS)] for word in words]


def _is_far(word: int, others: list[int]) -> bool:
    return all(abs(CODE_DIMS - 2 * (word ^ other).bit_count()) <= MAX_OVERLAP for other in others)
