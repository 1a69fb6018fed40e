"""Assignment of GPUs to the engines of a local cluster. Pure."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.flags import ConfigError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """An engine's `gpus` by rank, and most `engines` on one."""

    gpus: tuple[str, ...]
    engines: int


def seats_of(ranks: Mapping[str, int], gpus: Sequence[str], *, share: bool) -> dict[str, Seat]:
    """Assign GPUs round robin, never one twice to an engine. ConfigError for too few, unless
    shared.
    """
    total = sum(ranks.values())
    if total > len(gpus) and not share:
        several = f", which have {total} ranks," if total > len(ranks) else ""
        raise ConfigError(
            f"--share-gpus: {len(ranks)} engines{several} for {len(gpus)} GPU{'s' * (len(gpus) != 1)} ({', '.join(gpus)}); "
            "start fewer (--prefill, --decode), or give --share-gpus to put several on one GPU"
        )
    turns = itertools.cycle(gpus)
    taken = {name: tuple(itertools.islice(turns, min(count, len(gpus)))) for name, count in ranks.items()}
    load = Counter(gpu for places in taken.values() for gpu in places)
    return {name: Seat(gpus=places, engines=max(load[gpu] for gpu in places)) for name, places in taken.items()}


def chosen_gpus(visible: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the GPUs of --gpu-ids (index or UUID prefix), by default all. Raises ConfigError."""
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
