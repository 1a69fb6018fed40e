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
WORKER_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "TANDEM_PROGRESS": "1"}


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
    return 0 if config.unified else 2 * (config.prefill + config.decode) + config.encode


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
    if config.mps_prefill_percentage is not None and not config.share_gpus:
        raise ConfigError(
            f"--mps-prefill-percentage {config.mps_prefill_percentage}: is of a GPU that workers share; give --share-gpus, or "
            "leave it out"
        )
    if config.unified:
        unified = [_worker("unified-0", "unified", config.host, front, (), flags)]
        return _seated(unified, gpus, share=False) if gpus.names else unified
    workers, named = _workers(config, free, flags)
    workers = _sharing(workers, cores)
    if gpus.names:
        workers = _seated(workers, gpus, share=config.share_gpus)
    argv = [f"--host={config.host}", f"--port={front}", "--pd-disaggregation", *named]
    router = ProcessSpec(
        name="router",
        role="router",
        argv=_tandem("router", *argv, *router_args),
        url=url_of(config.host, front),
        health_path="/readiness?workers=all",
        alive_path="/liveness",
    )
    return [*workers, router]


def _workers(
    config: ClusterConfig, free: Sequence[int], flags: Mapping[str, RoleFlags]
) -> tuple[list[ProcessSpec], list[str]]:
    ports, backend = iter(free), f"{BACKEND}={config.transfer_backend}"
    workers, named = list[ProcessSpec](), list[str]()
    for role, count in (("prefill", config.prefill), ("decode", config.decode)):
        for i in range(count):
            http, bootstrap = next(ports), next(ports)
            own: tuple[str, ...] = (f"--disaggregation-bootstrap-port={bootstrap}", backend)
            workers.append(_worker(f"{role}-{i}", role, LOOPBACK, http, own, flags))
            named += [f"--{role}", workers[-1].url, *([str(bootstrap)] if role == "prefill" else [])]
    for i in range(config.encode):
        workers.append(_worker(f"encode-{i}", "encode", LOOPBACK, next(ports), (backend,), flags))
        named += ["--encode", workers[-1].url]
    return workers, named


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


@dataclass(frozen=True, kw_only=True)
class SharedGpus:
    """GPUs connected by engines. `limited`: prefill workers that share one with decode."""

    gpus: tuple[str, ...]
    engines: tuple[str, ...]
    limited: frozenset[str]


def shared_groups(specs: Sequence[ProcessSpec]) -> list[SharedGpus]:
    """Return connected groups (NVIDIA's MPS guide, "Error Containment")."""
    groups: list[tuple[list[str], list[str]]] = []
    roles, limited = {spec.name: spec.role for spec in specs}, set[str]()
    for gpu, names in shared_gpus(specs).items():
        if {"decode", "unified"}.intersection(roles[name] for name in names):
            limited.update(name for name in names if roles[name] == "prefill")
        joined = [group for group in groups if set(group[1]) & set(names)]
        groups = [group for group in groups if group not in joined]
        gpus = [gpu for group in joined for gpu in group[0]]
        others = [name for group in joined for name in group[1]]
        groups.append(([*gpus, gpu], list(dict.fromkeys([*others, *names]))))
    return [
        SharedGpus(gpus=tuple(gpus), engines=tuple(names), limited=frozenset(limited.intersection(names)))
        for gpus, names in groups
    ]


def with_env(specs: Sequence[ProcessSpec], names: Collection[str], env: Mapping[str, str]) -> list[ProcessSpec]:
    return [replace(spec, env={**spec.env, **env}) if spec.name in names else spec for spec in specs]


def _seated(workers: Sequence[ProcessSpec], gpus: Gpus, *, share: bool) -> list[ProcessSpec]:
    """GPUs round robin, never one twice to an engine. ConfigError for too few, unless shared."""
    names, total = gpus.names, sum(worker.ranks for worker in workers)
    if total > len(names) and not share:
        several = f", which have {total} ranks," if total > len(workers) else ""
        raise ConfigError(
            f"--share-gpus: {len(workers)} engines{several} for {len(names)} GPU{'s' * (len(names) != 1)} ({', '.join(names)}); "
            "start fewer (--prefill, --decode), or give --share-gpus to put several on one GPU"
        )
    turns = itertools.cycle(names)
    taken = [tuple(itertools.islice(turns, min(worker.ranks, len(names)))) for worker in workers]
    load = Counter(itertools.chain.from_iterable(taken))
    seated = []
    for worker, places in zip(workers, taken, strict=True):
        argv, engines = worker.argv, max(load[gpu] for gpu in places)
        if engines > 1:
            others = [arg for arg in argv if not arg.startswith(f"{MEM_FRACTION}=")]
            argv = (*others, f"{MEM_FRACTION}={gpus.mem_fraction / engines:.4g}")
        seated.append(replace(worker, argv=argv, env={**worker.env, VISIBLE: ",".join(places)}))
    return seated


def _worker(
    name: str, role: str, host: str, port: int, own: Sequence[str], flags: Mapping[str, RoleFlags]
) -> ProcessSpec:
    given = flags.get(role, RoleFlags())
    mode = "null" if role == "unified" else role
    argv = _tandem("serve", f"--disaggregation-mode={mode}", f"--host={host}", f"--port={port}", *own, *given.args)
    return ProcessSpec(name=name, role=role, argv=argv, url=url_of(host, port), env=WORKER_ENV, ranks=given.ranks)


def _tandem(*args: str) -> tuple[str, ...]:
    return (*TANDEM, *args)
