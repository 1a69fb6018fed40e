"""The processes of a local cluster: pure, from flags and free ports to command lines.

Knows how `tandem serve` and `tandem router` are called, not how processes are started.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.launcher.config import ClusterConfig
from service.http.listening import url_of

LOOPBACK = "127.0.0.1"

# OpenMP's waiting threads must not spin against those of others (facts: a spinning team turned 3 ms steps into 756 ms).
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TANDEM_PROGRESS": "1",
}


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. It is healthy once GET `url` + `health_path` answers 200."""

    name: str
    role: str  # "router", "prefill", "decode" or "unified"
    argv: tuple[str, ...]
    url: str
    health_path: str = "/health"
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClusterPorts:
    """Ports that were free a moment ago. Pairs: (HTTP, bootstrap server); a decode worker needs the latter as prefill."""

    front: int
    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]


def num_ports(config: ClusterConfig) -> int:
    return 0 if config.unified else 2 * (config.prefill + config.decode)


def assign_ports(*, num_prefill: int, front: int, free: Sequence[int]) -> ClusterPorts:
    """Deal `num_ports` free ports out to the workers, prefill workers first."""
    pairs = tuple(zip(free[::2], free[1::2], strict=True))
    return ClusterPorts(front=front, prefill=pairs[:num_prefill], decode=pairs[num_prefill:])


def plan_cluster(
    config: ClusterConfig,
    *,
    ports: ClusterPorts,
    cores: int,
    worker_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
) -> list[ProcessSpec]:
    """Return the processes in start order: workers, then the router.

    `*_args`: flags passed on as they are. `cores`: of this machine, for all engines together.
    """
    if config.unified:
        return [_unified(config.host, ports.front, worker_args)]
    common = (f"--disaggregation-transfer-backend={config.transfer_backend}", *worker_args)
    env = _sharing(cores // (config.prefill + config.decode))
    workers = [
        _worker(f"{role}-{i}", role, http, [f"--disaggregation-bootstrap-port={bootstrap}", *common], env)
        for role, pairs in (("prefill", ports.prefill), ("decode", ports.decode))
        for i, (http, bootstrap) in enumerate(pairs)
    ]
    return [*workers, _router(config.host, ports, router_args)]


def _sharing(cores: int) -> dict[str, str]:
    """Return the environment of an engine that shares the machine with others: `cores` is its share.

    Its OpenMP threads sleep at once when they wait, instead of after the moment that a lone worker's do (disagg/children.py).
    """
    return WORKER_ENV | {"OMP_NUM_THREADS": str(max(1, cores)), "GOMP_SPINCOUNT": "0"}


def _worker(name: str, role: str, port: int, args: Sequence[str], env: dict[str, str]) -> ProcessSpec:
    argv = _tandem("serve", f"--disaggregation-mode={role}", f"--host={LOOPBACK}", f"--port={port}", *args)
    return ProcessSpec(name=name, role=role, argv=argv, url=url_of(LOOPBACK, port), env=env)


def _unified(host: str, port: int, args: Sequence[str]) -> ProcessSpec:
    argv = _tandem("serve", "--disaggregation-mode=null", f"--host={host}", f"--port={port}", *args)
    return ProcessSpec(name="unified-0", role="unified", argv=argv, url=url_of(host, port), env=WORKER_ENV)


def _router(host: str, ports: ClusterPorts, args: Sequence[str]) -> ProcessSpec:
    argv = [f"--host={host}", f"--port={ports.front}", "--pd-disaggregation"]
    for http, bootstrap in ports.prefill:
        argv += ["--prefill", url_of(LOOPBACK, http), str(bootstrap)]
    for http, _ in ports.decode:
        argv += ["--decode", url_of(LOOPBACK, http)]
    return ProcessSpec(
        name="router",
        role="router",
        argv=_tandem("router", *argv, *args),
        url=url_of(host, ports.front),
        health_path="/readiness?workers=all",
    )


def _tandem(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "deploy", *args)  # -P: a folder "deploy" in the user's directory is not ours
