"""SplitMix64's finalizer on tensors (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", 2014).
"""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MUL_1 = 0xBF58476D1CE4E5B9
MUL_2 = 0x94D049BB133111EB


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def mix(x: Tensor) -> Tensor:
    """Mix int64 in place, a bijection."""
    x.bitwise_xor_(shift(x, 30)).mul_(signed(MUL_1))
    x.bitwise_xor_(shift(x, 27)).mul_(signed(MUL_2))
    return x.bitwise_xor_(shift(x, 31))


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
