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


def num_ports(config: ClusterConfig) -> int:
    """Two for each worker: HTTP, and the bootstrap server, which a decode worker needs once it is a prefill worker."""
    return 0 if config.unified else 2 * (config.prefill + config.decode)


def plan_cluster(
    config: ClusterConfig,
    *,
    front: int,
    free: Sequence[int],
    cores: int,
    worker_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
) -> list[ProcessSpec]:
    """Return the processes in start order: workers, then the router.

    `front`: the port that clients use. `free`: `num_ports` others. `*_args`: flags passed on as they are. `cores`: of this
    machine, for all engines together.
    """
    if config.unified:
        return [_worker("unified-0", "unified", config.host, front, worker_args, WORKER_ENV)]
    pairs = list(zip(free[::2], free[1::2], strict=True))
    prefill, decode = pairs[: config.prefill], pairs[config.prefill :]
    common = (f"--disaggregation-transfer-backend={config.transfer_backend}", *worker_args)
    env = _sharing(cores // (config.prefill + config.decode))
    workers = [
        _worker(f"{role}-{i}", role, LOOPBACK, http, [f"--disaggregation-bootstrap-port={bootstrap}", *common], env)
        for role, ports in (("prefill", prefill), ("decode", decode))
        for i, (http, bootstrap) in enumerate(ports)
    ]
    argv = [f"--host={config.host}", f"--port={front}", "--pd-disaggregation"]
    for http, bootstrap in prefill:
        argv += ["--prefill", url_of(LOOPBACK, http), str(bootstrap)]
    for http, _ in decode:
        argv += ["--decode", url_of(LOOPBACK, http)]
    router = ProcessSpec(
        name="router",
        role="router",
        argv=_tandem("router", *argv, *router_args),
        url=url_of(config.host, front),
        health_path="/readiness?workers=all",
    )
    return [*workers, router]


def _sharing(cores: int) -> dict[str, str]:
    """Return the environment of an engine that shares the machine with others: `cores` is its share.

    Its OpenMP threads sleep at once when they wait, instead of after the moment that a lone worker's do (disagg/children.py).
    """
    return WORKER_ENV | {"OMP_NUM_THREADS": str(max(1, cores)), "GOMP_SPINCOUNT": "0"}


def _worker(name: str, role: str, host: str, port: int, args: Sequence[str], env: dict[str, str]) -> ProcessSpec:
    mode = "null" if role == "unified" else role
    argv = _tandem("serve", f"--disaggregation-mode={mode}", f"--host={host}", f"--port={port}", *args)
    return ProcessSpec(name=name, role=role, argv=argv, url=url_of(host, port), env=env)


def _tandem(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "deploy", *args)  # -P: a folder "deploy" in the user's directory is not ours
