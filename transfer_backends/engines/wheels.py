"""Wheel of a transfer engine for torch's CUDA, without importing torch.

A wheel for another CUDA major fails to import (Mooncake) or loses its fast paths (NIXL).
"""

import re
from collections.abc import Sequence
from glob import glob
from importlib import metadata

FIRST_WITH_CUDA_13 = (2, 11)  # wheels without a local version, as on the index
NIXL = {None: "nixl-cu12", 12: "nixl-cu12", 13: "nixl-cu13"}  # cu12 runs without CUDA, too
MOONCAKE = {
    None: "mooncake-transfer-engine-non-cuda",
    12: "mooncake-transfer-engine",
    13: "mooncake-transfer-engine-cuda13",
}


def torch_cuda_major(version: str | None) -> int | None:
    """13 for "2.13.0+cu130" and "2.13.0"; None without torch or CUDA."""
    if version is None:
        return None
    public, _, local = version.partition("+")
    if local:
        found = re.match(r"cu(\d+)\d$", local)
        return int(found[1]) if found else None
    return 13 if tuple(map(int, re.findall(r"\d+", public)[:2])) >= FIRST_WITH_CUDA_13 else 12


def installed_torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def wheel_of(wheels: dict[int | None, str], torch: str | None) -> str:
    """The wheel for torch's CUDA, or the newest."""
    major = torch_cuda_major(torch)
    return wheels.get(major, wheels[13])


def extras_of(backend: str) -> Sequence[str]:
    """The extra of a transfer engine; `fake` has none."""
    if backend == "fake":
        return ()
    torch = installed_torch()
    # Without torch, a GPU of this machine decides.
    on_cuda = bool(glob("/dev/nvidia[0-9]*")) if torch is None else torch_cuda_major(torch) is not None
    return (f"{backend}-cu13" if on_cuda else f"{backend}-cpu",)
