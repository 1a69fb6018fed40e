"""Keeps the worker table equal to the pods that the selectors choose. Owns the watches and the workers they brought.

Workers named on the command line or by POST /workers are not touched. While the API server is away the pool stays as it is: health
checks notice death without it.
"""

import asyncio
import logging
from typing import Any

from router.config import DiscoveryFlags, label_query
from router.pool.health import HealthMonitor
from router.pool.pod_watch import KubeApi, PodWatch, connect
from router.pool.pods import Change, Drop, Leave, Pod, PodError, Reconciler, Wanted, read_pod
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, WorkerTableError
from service.waiter import loop_time_s

log = logging.getLogger(__name__)

REAP_S = 0.1  # between two looks at whether leaving workers have anything left to do


class Discovery:
    def __init__(self, flags: DiscoveryFlags, *, table: WorkerTable, monitor: HealthMonitor, api: KubeApi) -> None:
        self._table = table
        self._monitor = monitor
        self._api = api
        self._annotation = flags.prefill_bootstrap_port_annotation
        selectors = {
            Role.PREFILL: flags.prefill_selector,
            Role.DECODE: flags.decode_selector,
            Role.UNIFIED: flags.selector,
        }
        self._watches = [
            PodWatch(api, role, selector=label_query(parts), read=self._read, on_change=self._on_change)
            for role, parts in selectors.items()
            if parts
        ]
        self._reconciler = Reconciler(flags.service_discovery_port)
        self._logged: dict[str, str] = {}
        self._own: dict[str, Worker] = {}  # by URL: those that came from pods
        self._leaving: dict[int, Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._reap(), name="discovery reap")]
        self._tasks += [asyncio.create_task(watch.run(), name="discovery") for watch in self._watches]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    def status(self) -> dict[str, Any]:
        return {
            "roles": {watch.role.value: watch.status() for watch in self._watches},
            "workers": self._reconciler.num_joined,
            "leaving": len(self._leaving),
            "problems": dict(self._reconciler.problems),
        }

    def _read(self, raw: object) -> Pod | None:
        """None, and a line in the log, for an unreadable pod."""
        try:
            return read_pod(raw, annotation=self._annotation)
        except PodError as err:
            log.warning("service discovery: %s", err)
            return None

    def _on_change(self) -> None:
        """Apply the pods of all watches, once each has been listed: until then workers would seem to be gone."""
        if not all(watch.listed for watch in self._watches):
            return
        for change in self._reconciler.changes({watch.role: watch.pods.pods() for watch in self._watches}):
            self._apply(change)
        self._log_problems()

    def _apply(self, change: Change) -> None:
        match change:
            case Wanted():
                self._join(change)
            case Leave(url, last_resort):
                self._leave(url, last_resort=last_resort)
            case Drop(url):
                self._drop(url)

    def _join(self, wanted: Wanted) -> None:
        url, role, port = wanted.url, wanted.role, wanted.bootstrap_port
        try:
            worker = self._table.add(url, role=role, bootstrap_port=port, now_s=loop_time_s(), discovered=True)
        except WorkerTableError as err:
            log.warning("service discovery: pod %s is not taken: %s", wanted.pod, err)
            return
        log.info("service discovery: pod %s is %s worker %s", wanted.pod, role, url)
        self._own[url] = worker
        self._monitor.watch(worker)

    def _leave(self, url: str, *, last_resort: bool) -> None:
        worker = self._own.get(url)
        if worker is None or worker not in self._table.workers():
            self._reconciler.left(url)  # named by hand, or taken out by hand
            self._own.pop(url, None)
            return
        self._table.retire(url, last_resort=last_resort)
        self._leaving[worker.worker_id] = worker
        log.info("service discovery: %s leaves, %d requests run there", url, worker.inflight_requests)

    def _drop(self, url: str) -> None:
        worker = self._own.pop(url, None)
        if worker is not None and worker in self._table.workers():
            self._table.remove(url)
            self._monitor.retire(worker)
        if worker is not None:
            self._leaving.pop(worker.worker_id, None)

    async def _reap(self) -> None:
        """Remove workers that leave, have no request left, and are no last resort."""
        while True:
            for worker in [w for w in self._leaving.values() if self._is_done(w)]:
                self._drop(worker.url)
                self._reconciler.left(worker.url)
                log.info("service discovery: %s has left", worker.url)
            await asyncio.sleep(REAP_S)

    def _is_done(self, worker: Worker) -> bool:
        return not worker.inflight_requests and worker not in self._table.alive(worker.role)

    def _log_problems(self) -> None:
        problems = dict(self._reconciler.problems)
        for watch in self._watches:
            if watch.pods.num_refused:
                problems[watch.role] = "more pods than a router takes; those beyond are left out"
        for name, why in problems.items():
            if self._logged.get(name) != why:
                log.warning("service discovery: pod %s is no worker: %s", name, why)
        self._logged = problems


async def open_discovery(flags: DiscoveryFlags, *, table: WorkerTable, monitor: HealthMonitor) -> Discovery | None:
    """None without --service-discovery. Raises `ConfigError` if no API server is known."""
    if not flags.service_discovery:
        return None
    return Discovery(
        flags, table=table, monitor=monitor, api=await connect(namespace=flags.service_discovery_namespace)
    )
