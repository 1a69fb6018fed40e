"""Which GPU each engine of a local cluster gets. Pure but for `installed_gpus`; torch is not imported."""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.flags import ConfigError

LISTING_TIMEOUT_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """An engine's place. `gpu`: what CUDA_VISIBLE_DEVICES names. `engines`: how many share that GPU."""

    gpu: str
    engines: int


def seats_of(names: Sequence[str], gpus: Sequence[str], *, share: bool) -> dict[str, Seat]:
    """Give each engine a GPU, in turn. Raises ConfigError for more engines than GPUs, unless they may share."""
    if len(names) > len(gpus) and not share:
        raise ConfigError(
            f"--share-gpus: {len(names)} engines for {len(gpus)} GPU{'s' * (len(gpus) != 1)} ({', '.join(gpus)}); "
            "start fewer (--prefill, --decode), or give --share-gpus to put several on one GPU"
        )
    load = [len(range(i, len(names), len(gpus))) for i in range(len(gpus))]
    return {name: Seat(gpu=gpus[i % len(gpus)], engines=load[i % len(gpus)]) for i, name in enumerate(names)}


def chosen_gpus(visible: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the GPUs that --gpu-ids names, by place among the visible ones or by UUID (its beginning); all if it is empty.

    Raises ConfigError.
    """
    found = [_chosen(visible, name) for name in wanted] if wanted else list(visible)
    if len(set(found)) < len(found):
        raise ConfigError(f"--gpu-ids {' '.join(wanted)}: names a GPU twice")
    return found


def _chosen(visible: Sequence[str], name: str) -> str:
    if name.isdecimal():
        fitting = list(visible[int(name) : int(name) + 1])
    else:
        fitting = [gpu for gpu in visible if gpu.startswith(name)]
    if len(fitting) != 1:
        there = ", ".join(f"{i} ({gpu})" for i, gpu in enumerate(visible)) or "none"
        raise ConfigError(f"--gpu-ids {name}: names no GPU that is visible here: {there}")
    return fitting[0]


def visible_gpus(outer: str | None, installed: Callable[[], Sequence[str]]) -> list[str]:
    """Return the GPUs that this process may use. `outer`: its CUDA_VISIBLE_DEVICES, which ends at its first void entry."""
    if outer is None:
        return list(installed())
    found: list[str] = []
    for entry in map(str.strip, outer.split(",")):
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return found


def installed_gpus() -> list[str]:
    """Return this machine's GPUs, as UUIDs where nvidia-smi tells them, else by number."""
    if (tool := shutil.which("nvidia-smi")) is not None:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=LISTING_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return parse_listing(done.stdout)
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(i) for i in range(len(nodes))]  # in a container nvidia5 may be the only one: CUDA's number 0


def parse_listing(text: str) -> list[str]:
    """Return the UUIDs in what `nvidia-smi -L` prints. A GPU that is cut up (MIG) is its parts: CUDA sees only those."""
    found: list[list[str]] = []
    for kind, uuid in re.findall(r"^\s*(GPU|MIG) .*\(UUID: ([^)]+)\)", text, re.MULTILINE):
        if kind == "GPU":
            found.append([uuid])
        elif found:
            found[-1].append(uuid)
    return [uuid for gpu in found for uuid in (gpu[1:] or gpu)]
