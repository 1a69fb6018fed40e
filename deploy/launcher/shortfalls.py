"""Missing features of this machine, their cost and fix. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

COMPILER = "apt-get install gcc libc6-dev, or: pip install 'tandem-serve[compiler]'"
HUGE_PAGES = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
BY_TORCH = "torch computes instead, several times slower"


def shortfalls(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = (line for info in infos for part in (_kernels, _huge_pages) for line in part(info))
    return list(dict.fromkeys(lines))


def _kernels(info: Mapping[str, Any]) -> list[str]:
    state = info.get("c_kernels")
    if state == "no compiler":
        return [f"No C kernels: this machine has no C compiler; {BY_TORCH}. Mend it: {COMPILER}"]
    if state == "failed":
        return [f"No C kernels: {info.get('c_kernels_error')}; {BY_TORCH}. It may be mended by: {COMPILER}"]
    if state == "off":
        return [f"No C kernels: TANDEM_NO_C_KERNELS=1 turns them off; {BY_TORCH}. Mend it: unset TANDEM_NO_C_KERNELS"]
    return []


def _huge_pages(info: Mapping[str, Any]) -> list[str]:
    if info.get("huge_pages") != "never":
        return []
    return [
        "No huge pages: one thread reads weights and KV about 1.7 times as fast where the system grants them."
        f" Mend it: {HUGE_PAGES}"
    ]
