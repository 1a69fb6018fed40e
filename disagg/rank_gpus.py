"""GPUs of a worker, one per rank."""

import os
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.device.gpus import VISIBLE, installed_gpus, visible_gpus
from service.flags import ConfigError
from transfer_backends.engines.wheels import installed_torch, torch_cuda_major


def gpus_of_ranks(engine: EngineConfig, visible: Callable[[], Sequence[str]]) -> list[tuple[str, ...]]:
    """Assign a GPU to each rank; () leaves all visible ones. Raises ConfigError.

    Ranks over several machines are CPU only.
    """
    size, count = engine.num_ranks, engine.dp_size * engine.num_ranks
    if count == 1 or engine.nnodes > 1 or engine.device == "cpu" or not (gpus := visible()):
        return [()] * engine.dp_size
    if count > len(gpus):
        flags = {"--tp-size": engine.tp_size, "--pp-size": engine.pp_size, "--dp-size": engine.dp_size}
        given = ", ".join(f"{flag} {value}" for flag, value in flags.items() if value > 1)
        raise ConfigError(
            f"{given}: {count} ranks for {len(gpus)} GPU{'s' * (len(gpus) > 1)} "
            f"({', '.join(gpus)}); lower it, make more visible (CUDA_VISIBLE_DEVICES), or give --device cpu"
        )
    return [tuple(gpus[first : first + size]) for first in range(0, count, size)]


def visible_here() -> list[str]:
    """Return visible GPUs, none if torch lacks CUDA."""
    if torch_cuda_major(installed_torch()) is None:
        return []
    return visible_gpus(os.environ.get(VISIBLE), installed_gpus)
