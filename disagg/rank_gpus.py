"""The GPU of each DP rank of a worker."""

import os
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.gpus import VISIBLE, installed_gpus, visible_gpus
from service.flags import ConfigError
from transfer_backends.engines.wheels import installed_torch, torch_cuda_major


def gpus_of_ranks(engine: EngineConfig, visible: Callable[[], Sequence[str]]) -> list[str | None]:
    """Give each rank one of the GPUs that this process sees. Raises ConfigError for more ranks than GPUs.

    None: it takes what it sees, as without ranks.
    """
    if engine.dp_size == 1 or engine.device == "cpu" or not (gpus := visible()):
        return [None] * engine.dp_size
    if engine.dp_size > len(gpus):
        raise ConfigError(
            f"--dp-size {engine.dp_size}: {engine.dp_size} ranks for {len(gpus)} GPU{'s' * (len(gpus) > 1)} "
            f"({', '.join(gpus)}); lower it, make more visible (CUDA_VISIBLE_DEVICES), or give --device cpu"
        )
    return list(gpus[: engine.dp_size])


def visible_here() -> list[str]:
    """Empty where torch has no CUDA."""
    if torch_cuda_major(installed_torch()) is None:
        return []
    return visible_gpus(os.environ.get(VISIBLE), installed_gpus)
