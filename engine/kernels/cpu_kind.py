"""Arithmetic kinds of C kernels by CPU features. Pure.

A kind has fixed compiler flags, for equal bits on all machines.
"""

from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NamedTuple

KIND_VARIABLE = "TANDEM_CPU_KIND"


class Kind(IntEnum):
    """`enum kind` of kind.h."""

    GENERIC = 1
    NEON = 2
    NEON_BF16 = 3
    AVX2 = 4
    AVX512 = 5
    AVX512_BF16 = 6
    AMX = 7

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


class CpuKindError(ValueError):
    """The requested kind does not exist, or this CPU lacks it."""


class _Needs(NamedTuple):
    machine: str
    features: frozenset[str]  # from /proc/cpuinfo
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_HAS_BF16 = _HAS_AVX512 | {"avx512_bf16"}
# Byte lookup for 8-bit integers: faster, with the same bits.
_LOOKUP, _HAS_LOOKUP = "-mavx512vbmi", "avx512vbmi"

# Flags per feature instead of -march=, which old compilers may not know. Best first.
_KINDS = {
    Kind.AMX: _Needs(
        "x86_64", _HAS_BF16 | {"amx_tile", "amx_bf16"}, (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
    ),
    Kind.AVX512_BF16: _Needs("x86_64", _HAS_BF16, (*_AVX512, "-mavx512bf16")),
    Kind.AVX512: _Needs("x86_64", _HAS_AVX512, _AVX512),
    Kind.AVX2: _Needs("x86_64", _HAS_AVX2, _AVX2),
    Kind.NEON_BF16: _Needs("aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",)),
    Kind.NEON: _Needs("aarch64", frozenset(), ("-march=armv8-a",)),
    Kind.GENERIC: _Needs("", frozenset(), ()),
}


def kinds_of(machine: str, features: AbstractSet[str]) -> list[Kind]:
    """Kinds by `platform.machine` and /proc/cpuinfo's features, best first."""
    own = {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)
    return [kind for kind, needs in _KINDS.items() if needs.machine in ("", own) and needs.features <= features]


def flags_of(kind: Kind, features: AbstractSet[str]) -> tuple[str, ...]:
    looks_up = kind >= Kind.AVX512_BF16 and _HAS_LOOKUP in features
    return (*_KINDS[kind].flags, _LOOKUP) if looks_up else _KINDS[kind].flags


def kinds_to_try(machine: str, features: AbstractSet[str], forced: str | None) -> list[Kind]:
    """Kinds to build, at best `forced`. Raises CpuKindError."""
    own = kinds_of(machine, features)
    if not forced:
        return own
    labels = [kind.label for kind in own]
    if forced not in labels:
        raise CpuKindError(f"{KIND_VARIABLE}={forced}: this CPU ({machine}) has {', '.join(labels)}; name one of them")
    return own[labels.index(forced) :]
