"""Which GPU each engine of a local cluster gets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.flags import ConfigError


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
