"""Command lines of a local cluster. Pure."""

import itertools
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deploy.launcher.roles import ClusterConfig, RoleFlags
from engine.device.gpus import VISIBLE
from service.flags import ConfigError
from service.http.listening import url_of

# ---- Assignment of GPUs to the engines of a local cluster. Pure.


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
    """`wanted`: indices or UUID prefixes; empty: all. Raises ConfigError."""
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


# ---- plan

LOOPBACK = "127.0.0.1"
TANDEM = (sys.executable, "-P", "-m", "deploy")  # -P: ignores a directory "deploy" of the user
NO_FLAGS: Mapping[str, RoleFlags] = {}
MEM_FRACTION = "--mem-fraction-static"
BACKEND = "--disaggregation-transfer-backend"

# Waiting OpenMP threads must not spin against others: 3 ms steps took 756 ms.
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TANDEM_PROGRESS": "1",
}


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process, healthy once GET `url` + `health_path` returns 200."""

    name: str
    role: str  # "router", "prefill", "decode", "unified" or "encode"
    argv: tuple[str, ...]
    url: str
    health_path: str = "/health"
    alive_path: str = "/health"  # 200 whatever other processes do
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 0


def num_ports(config: ClusterConfig) -> int:
    """HTTP, and a bootstrap server per worker whose role may switch."""
    return 0 if config.unified else 2 * (config.prefill + config.decode) + config.mixed + config.encode


class Gpus(NamedTuple):
    """`mem_fraction`: --mem-fraction-static of an unshared one."""

    names: Sequence[str] = ()
    mem_fraction: float = 0.0


NO_GPUS = Gpus()


def plan_cluster(
    config: ClusterConfig,
    *,
    front: int,
    free: Sequence[int],
    cores: int,
    gpus: Gpus = NO_GPUS,
    flags: Mapping[str, RoleFlags] = NO_FLAGS,
    router_args: Sequence[str] = (),
) -> list[ProcessSpec]:
    """The processes in start order. ConfigError for too few GPUs.

    `front`: the clients' port. `cores`, `gpus`: for all ranks.
    """
    if config.unified:
        alone = flags.get("unified", RoleFlags())
        unified = [_worker("unified-0", "unified", config.host, front, (), alone)]
        return _seated(unified, gpus, share=False) if gpus.names else unified
    ports = _ports_of(config, free)
    workers = [
        _member(f"{role}-{i}", role, member, config.transfer_backend, flags.get(role, RoleFlags()))
        for role in ("prefill", "decode")
        for i, member in enumerate(ports.pairs[role])
    ]
    backend = (f"{BACKEND}={config.transfer_backend}",)
    workers += _alone("unified", ports.unified, backend if ports.encode else (), flags)
    workers += _alone("encode", ports.encode, backend, flags)
    workers = _sharing(workers, cores)
    if gpus.names:
        workers = _seated(workers, gpus, share=config.share_gpus)
    argv = [f"--host={config.host}", f"--port={front}", "--pd-disaggregation"]
    for http, bootstrap in ports.pairs["prefill"]:
        argv += ["--prefill", url_of(LOOPBACK, http), str(bootstrap)]
    for http, _ in ports.pairs["decode"]:
        argv += ["--decode", url_of(LOOPBACK, http)]
    if ports.unified:
        argv += ["--mixed", "--worker-urls", *(url_of(LOOPBACK, http) for http in ports.unified)]
    for http in ports.encode:
        argv += ["--encode", url_of(LOOPBACK, http)]
    router = ProcessSpec(
        name="router",
        role="router",
        argv=_tandem("router", *argv, *router_args),
        url=url_of(config.host, front),
        health_path="/readiness?workers=all",
        alive_path="/liveness",
    )
    return [*workers, router]


@dataclass(frozen=True, kw_only=True)
class _Ports:
    """`pairs`: ports of HTTP and of the bootstrap server."""

    pairs: Mapping[str, Sequence[tuple[int, int]]]
    unified: Sequence[int]
    encode: Sequence[int]


def _ports_of(config: ClusterConfig, free: Sequence[int]) -> _Ports:
    end = 2 * (config.prefill + config.decode)
    pairs = list(zip(free[:end:2], free[1:end:2], strict=True))
    return _Ports(
        pairs={"prefill": pairs[: config.prefill], "decode": pairs[config.prefill :]},
        unified=free[end : end + config.mixed],
        encode=free[end + config.mixed :],
    )


def _sharing(workers: Sequence[ProcessSpec], cores: int) -> list[ProcessSpec]:
    """C kernels may use all cores, as their threads do not wait for descheduled ones. Torch's
    threads and ranks meet at barriers, so get a share; their OpenMP threads sleep at once
    (disagg/processes/children.py). One limit for all, as one server may fork them.
    """
    total = sum(worker.ranks for worker in workers)
    env = WORKER_ENV | {"OMP_THREAD_LIMIT": str(max(1, cores // total)), "GOMP_SPINCOUNT": "0"}
    threads = [cores if worker.ranks == 1 else max(1, cores * worker.ranks // total) for worker in workers]
    return [replace(worker, env=env | {"OMP_NUM_THREADS": str(n)}) for worker, n in zip(workers, threads, strict=True)]


def shared_gpus(specs: Sequence[ProcessSpec]) -> dict[str, list[str]]:
    """Engines by GPU, if several."""
    engines: dict[str, list[str]] = {}
    for spec in specs:
        for gpu in spec.env[VISIBLE].split(",") if VISIBLE in spec.env else ():
            engines.setdefault(gpu, []).append(spec.name)
    return {gpu: names for gpu, names in engines.items() if len(names) > 1}


def with_env(specs: Sequence[ProcessSpec], names: Collection[str], env: Mapping[str, str]) -> list[ProcessSpec]:
    return [replace(spec, env={**spec.env, **env}) if spec.name in names else spec for spec in specs]


def _seated(workers: Sequence[ProcessSpec], gpus: Gpus, *, share: bool) -> list[ProcessSpec]:
    seats = seats_of({worker.name: worker.ranks for worker in workers}, gpus.names, share=share)
    return [_on_gpu(worker, seats[worker.name], gpus.mem_fraction) for worker in workers]


def _on_gpu(worker: ProcessSpec, seat: Seat, mem_fraction: float) -> ProcessSpec:
    argv = worker.argv
    if seat.engines > 1:
        others = [arg for arg in argv if not arg.startswith(f"{MEM_FRACTION}=")]
        argv = (*others, f"{MEM_FRACTION}={mem_fraction / seat.engines:.4g}")
    return replace(worker, argv=argv, env={**worker.env, VISIBLE: ",".join(seat.gpus)})


def _member(name: str, role: str, ports: tuple[int, int], backend: str, flags: RoleFlags) -> ProcessSpec:
    http, bootstrap = ports
    own = (f"--disaggregation-bootstrap-port={bootstrap}", f"{BACKEND}={backend}")
    return _worker(name, role, LOOPBACK, http, own, flags)


def _alone(role: str, ports: Sequence[int], own: Sequence[str], flags: Mapping[str, RoleFlags]) -> list[ProcessSpec]:
    given = flags.get(role, RoleFlags())
    return [_worker(f"{role}-{i}", role, LOOPBACK, http, own, given) for i, http in enumerate(ports)]


def _worker(name: str, role: str, host: str, port: int, own: Sequence[str], flags: RoleFlags) -> ProcessSpec:
    mode = "null" if role == "unified" else role
    argv = _tandem("serve", f"--disaggregation-mode={mode}", f"--host={host}", f"--port={port}", *own, *flags.args)
    return ProcessSpec(name=name, role=role, argv=argv, url=url_of(host, port), env=WORKER_ENV, ranks=flags.ranks)


def _tandem(*args: str) -> tuple[str, ...]:
    return (*TANDEM, *args)
