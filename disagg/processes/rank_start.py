"""Start of a follower's process, and description of its end. Never torch."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from disagg.config import RankSpec
from disagg.processes.children import POLL_S, Children
from engine.config import EngineConfig
from engine.device.gpus import VISIBLE, installed_gpus, visible_gpus
from engine.flags.local_defaults import shares_cores
from service.flags import ConfigError
from service.process.child_process import ChildProcess
from transfer_backends.engines.wheels import installed_torch, torch_cuda_major

STATUS_WAIT_S = 0.3  # a process that closed its socket ends at once, unless it hangs


def start_rank(children: Children, spec: RankSpec) -> ChildProcess:
    engine, gpus = spec.scheduler.engine, spec.scheduler.gpus
    joint = () if spec.scheduler.joint is None else (spec.scheduler.joint.memory,)
    store = () if spec.store is None else (spec.store,)
    return children.start(
        f"rank {spec.rank}",
        "disagg.processes.rank_process",
        ["--spec-json", msgspec.json.encode(spec).decode()],
        num_threads=engine.num_threads or 1,
        descriptors=(*spec.descriptors, *spec.wires.values(), *joint, *store),
        shares_cores=engine.num_threads is not None and shares_cores(engine),
        gpu=gpus[spec.rank] if gpus else None,
    )


def how_ended(process: ChildProcess) -> str:
    """Text like "ended: SIGKILL"."""
    deadline_s = time.monotonic() + STATUS_WAIT_S
    while (status := process.poll()) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if status is None:
        return "closed its socket"
    return f"ended: {signal.Signals(-status).name}" if status < 0 else f"ended: status {status}"


# ---- GPUs of a worker, one per rank.


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


def on_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and bool(visible_here()))


def visible_here() -> list[str]:
    """None if torch lacks CUDA."""
    if torch_cuda_major(installed_torch()) is None:
        return []
    return visible_gpus(os.environ.get(VISIBLE), installed_gpus)
