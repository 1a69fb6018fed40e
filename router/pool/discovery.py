"""Service discovery: keeps the worker table equal to the selected pods.

Workers named otherwise are not touched. While the API server is away the pool stays, and health
checks notice dead workers.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.config import DiscoveryFlags, label_query
from router.pool.health import HealthMonitor
from router.pool.pod_watch import KubeApi, Pod, PodWatch, connect
from router.pool.reports import port_of
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, WorkerTableError
from service.waiter import end_tasks, loop_time_s

log = logging.getLogger(__name__)

REAP_S = 0.1  # between two checks of leaving workers
GATHER_S = 0.1  # changes within this time are handled together
MAX_PROBLEMS = 64


class Discovery:
    def __init__(self, flags: DiscoveryFlags, *, table: WorkerTable, monitor: HealthMonitor, api: KubeApi) -> None:
        self._api = api
        selectors = {
            Role.PREFILL: flags.prefill_selector,
            Role.DECODE: flags.decode_selector,
            Role.UNIFIED: flags.selector,
            Role.ENCODE: flags.encode_selector,
        }
        self._watches = [
            PodWatch(api=api, role=role, selector=label_query(parts), on_change=self._on_change)
            for role, parts in selectors.items()
            if parts
        ]
        self._workers = PodWorkers(table, monitor, port=flags.service_discovery_port)
        self._logged: dict[str, str] = {}
        self._looked_s = -math.inf
        self._later: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._reap(), name="discovery reap")]
        self._tasks += [asyncio.create_task(watch.run(), name="discovery") for watch in self._watches]

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await end_tasks(self._tasks)
        await self._api.close()

    def status(self) -> dict[str, Any]:
        roles = {watch.role.value: watch.status() for watch in self._watches}
        return {"roles": roles, **self._workers.counts(), "problems": dict(self._workers.problems)}

    def _on_change(self) -> None:
        if self._later is None:
            wait_s = self._looked_s + GATHER_S - loop_time_s()
            if wait_s > 0:
                self._later = asyncio.get_running_loop().call_later(wait_s, self._look)
            else:
                self._look()

    def _look(self) -> None:
        self._later, self._looked_s = None, loop_time_s()
        if all(watch.listed for watch in self._watches):
            self._workers.update({watch.role: watch.pods.pods() for watch in self._watches}, now_s=loop_time_s())
            problems = dict(self._workers.problems)
            for watch in self._watches:
                if watch.pods.num_refused:
                    problems[watch.role] = "more pods than a router takes; those beyond are left out"
            for name, why in problems.items():
                if self._logged.get(name) != why:
                    log.warning("service discovery: pod %s is no worker: %s", name, why)
            self._logged = problems

    async def _reap(self) -> None:
        while True:
            self._workers.reap()
            await asyncio.sleep(REAP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    url: str
    role: Role
    bootstrap_port: int | None
    pod: str
    uid: str


@dataclass(slots=True)
class _Joined:
    """`worker`: None if already named by hand."""

    wanted: Wanted
    worker: Worker | None

    @property
    def leaving(self) -> bool:
        return self.worker is not None and self.worker.leaving


@dataclass(slots=True)
class PodWorkers:
    """Decisions depend on pods and table only.

        pod   absent --ready--> joined --deleted, ended, deselected--> leaving --idle--> absent

    Readiness only admits: afterwards health checks are faster, and distinguish draining from dead.
    """

    table: WorkerTable
    monitor: HealthMonitor
    port: int
    problems: dict[str, str] = field(default_factory=dict)  # ready pod -> why it is no worker
    _joined: dict[str, _Joined] = field(default_factory=dict)  # by URL

    def update(self, pods: Mapping[Role, Sequence[Pod]], *, now_s: float) -> None:
        wanted = self._wanted(pods)
        ending = {(pod.name, pod.uid) for role in pods for pod in pods[role] if pod.ending}
        for url, joined in list(self._joined.items()):
            if url not in wanted:
                self._leave(joined, ending=(joined.wanted.pod, joined.wanted.uid) in ending)
        for want in wanted.values():
            self._enter(want, now_s)

    def reap(self) -> None:
        """Remove idle leaving workers, except last resorts."""
        for joined in [joined for joined in self._joined.values() if joined.leaving]:
            worker = joined.worker
            if worker is not None and not worker.inflight_requests and not self.table.is_alive(worker):
                self._drop(joined)
                log.info("service discovery: %s has left", worker.url)

    def counts(self) -> dict[str, int]:
        leaving = sum(joined.leaving for joined in self._joined.values())
        return {"workers": len(self._joined) - leaving, "leaving": leaving}

    def _enter(self, want: Wanted, now_s: float) -> None:
        joined = self._joined.get(want.url)
        if joined is not None:
            if joined.wanted == want and not joined.leaving:
                return
            self._drop(joined)  # another pod has its address; running requests continue or fail
        worker, port = None, want.bootstrap_port
        try:
            worker = self.table.add(want.url, role=want.role, bootstrap_port=port, now_s=now_s, discovered=True)
        except WorkerTableError as err:
            log.warning("service discovery: pod %s is not taken: %s", want.pod, err)
        else:
            log.info("service discovery: pod %s is %s worker %s", want.pod, want.role, want.url)
            self.monitor.watch(worker)
        self._joined[want.url] = _Joined(want, worker)

    def _leave(self, joined: _Joined, *, ending: bool) -> None:
        """No new requests. A pod being deleted (`ending`) serves for seconds, as a last resort."""
        url, worker = joined.wanted.url, joined.worker
        if worker is None or worker not in self.table:
            del self._joined[url]  # named or removed by hand
        elif not worker.leaving or (worker.last_resort and not ending):
            self.table.retire(url, last_resort=ending)
            log.info("service discovery: %s leaves, %d requests run there", url, worker.inflight_requests)

    def _drop(self, joined: _Joined) -> None:
        worker = joined.worker
        if worker is not None and worker in self.table:
            self.table.remove(worker.url)
            self.monitor.retire(worker)
        del self._joined[joined.wanted.url]

    def _wanted(self, pods: Mapping[Role, Sequence[Pod]]) -> dict[str, Wanted]:
        self.problems = {}
        found: dict[str, Wanted] = {}
        for role in sorted(pods):
            for pod in pods[role]:
                want = self._want(pod, role)
                if want is not None and (other := found.setdefault(want.url, want)) is not want:
                    self._problem(pod, _shared(want, other))
        return found

    def _want(self, pod: Pod, role: Role) -> Wanted | None:
        if pod.ending:
            return None
        if not pod.ip:
            if pod.ready:
                self._problem(pod, "it is ready, but has no status.podIP")
            return None
        url = f"http://[{pod.ip}]:{self.port}" if ":" in pod.ip else f"http://{pod.ip}:{self.port}"
        joined = self._joined.get(url)
        is_in = joined is not None and not joined.leaving and joined.wanted.uid == pod.uid
        if not (pod.ready or is_in):
            return None
        text = pod.bootstrap_port if role is Role.PREFILL else None
        port = None if text is None else port_of(text)
        if text is not None and port is None:
            self._problem(pod, f"its bootstrap port must be 1 to 65535, got {text[:40]!r}")
            return None
        return Wanted(url=url, role=role, bootstrap_port=port, pod=pod.name, uid=pod.uid)

    def _problem(self, pod: Pod, why: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[pod.name] = why


def _shared(want: Wanted, other: Wanted) -> str:
    if want.pod == other.pod:
        return f"both selectors choose it; it serves as {other.role}"
    return f"pod {other.pod} has its address {want.url}"


async def open_discovery(flags: DiscoveryFlags, *, table: WorkerTable, monitor: HealthMonitor) -> Discovery | None:
    """ConfigError without API server."""
    if not flags.service_discovery:
        return None
    api = await connect(namespace=flags.service_discovery_namespace)
    return Discovery(flags, table=table, monitor=monitor, api=api)
