"""Switches a worker's role, and waits for it in the other pool.

The health monitor notices every change, requested here or elsewhere.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.client.session import call_worker
from router.fleet import PeerProcesses
from router.pool.breaker import Check, Health
from router.pool.health import HealthMonitor
from router.pool.reports import parse_error
from router.pool.worker import PAIR, Role, Worker
from router.pool.workers import WorkerTable
from service.http.errors import ApiError, object_of
from service.waiter import end_tasks

log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0  # for the drain and loading a model
POLL_S = 0.2
PATH = "/workers/role"


class SwitchProgress(StrEnum):
    UNDER_WAY = "under way"
    THERE = "it serves in the new role"
    WENT_BACK = "it started again in its old role"
    ENDED = "it has ended"
    REMOVED = "it was taken out of the table"


class SwitchRefused(ApiError):
    """The switch was refused, and nothing has changed."""

    def __init__(self, message: str) -> None:
        super().__init__(409, message, code="switch_refused")


class SwitchFailed(ApiError):
    """The worker did not return in the new role."""

    def __init__(self, message: str) -> None:
        super().__init__(502, message, code="switch_failed")


@dataclass(slots=True, kw_only=True)
class Switch:
    table: WorkerTable
    monitor: HealthMonitor
    session: aiohttp.ClientSession
    credentials: Credentials
    peers: PeerProcesses
    _moves: set[asyncio.Task[None]] = field(default_factory=set)

    async def move(
        self,
        worker: Worker,
        role: Role,
        *,
        force: bool = False,
        drain_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Return when `worker` serves as `role`. Raises SwitchRefused, SwitchFailed.

        Cancelling does not end the switch. `force` may empty a pool. `drain_s` defaults to the
        worker's --drain-timeout, `headers` to the router's admin key.
        """
        if worker.role is role and worker.switching_to is None:
            return
        if why := objection(self.table, worker, role, force=force):
            raise SwitchRefused(f"{worker.url}: {why}")
        self.table.set_switching(worker, role)
        headers = self.credentials.own_admin() if headers is None else headers
        task = asyncio.create_task(self._move(worker, role, drain_s, headers), name=f"switch {worker.url}")
        self._moves.add(task)
        task.add_done_callback(self._over)
        await asyncio.shield(task)

    async def close(self) -> None:
        await end_tasks(self._moves)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", task.get_name(), error)

    async def _move(self, worker: Worker, role: Role, drain_s: float | None, headers: dict[str, str]) -> None:
        try:
            was, old = worker.process.incarnation, worker.role
            await self._ask(worker, role, drain_s, headers)
            await self._announce(worker, role)
            await self._until_there(worker, role, was=was, timeout_s=START_TIMEOUT_S + (drain_s or 0.0))
            log.info("worker %s has changed from %s to %s", worker.url, old, role)
        finally:
            self.table.set_switching(worker, None)
            self.monitor.look(worker)
        await self._announce(worker, role)

    async def _ask(self, worker: Worker, role: Role, drain_s: float | None, headers: dict[str, str]) -> None:
        body = {"role": role.value, **({} if drain_s is None else {"timeout": drain_s})}
        url, data = f"{worker.url}/switch_role", msgspec.json.encode(body)
        answer = await call_worker(self.session, "POST", url, headers, data)
        text = answer.body.decode(errors="replace")
        if not answer.status:
            raise SwitchFailed(f"{worker.url} could not be reached: {text}")
        if answer.status in (404, 405):
            raise SwitchRefused(f"{worker.url} has no /switch_role: a worker of another make or version")
        if answer.status not in (200, 202):
            why = parse_error(answer.body)
            raise SwitchRefused(f"{worker.url} answers {answer.status}: {text[:200] if why is None else why}")

    async def _until_there(self, worker: Worker, role: Role, *, was: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (now := progress(self.table, worker, role, was=was)) is SwitchProgress.UNDER_WAY:
                    self.monitor.look(worker)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise SwitchFailed(f"{worker.url} is not back after {timeout_s:g} s: {worker.checks.error}") from None
        if now is SwitchProgress.WENT_BACK:
            raise SwitchFailed(f"{worker.url}: {now}: {await self._why(worker)}")
        if now is not SwitchProgress.THERE:
            raise SwitchFailed(f"{worker.url}: {now}: {worker.checks.error}")

    async def _why(self, worker: Worker) -> str:
        answer = await call_worker(self.session, "GET", f"{worker.url}/server_info", self.credentials.own())
        last = object_of(answer.body).get("last_switch")
        error = last.get("error") if isinstance(last, dict) else None
        return error if isinstance(error, str) else "it was restarted"

    async def _announce(self, worker: Worker, role: Role) -> None:
        await self.peers.request("POST", PATH, {"url": worker.url, "role": role.value})


def objection(table: WorkerTable, worker: Worker, role: Role, *, force: bool = False) -> str:
    if worker.role not in PAIR or role not in PAIR:
        return "only prefill and decode workers change their role"
    if worker not in table:
        return "it is not in the table"
    if worker.switching_to is not None:
        return f"it is becoming a {worker.switching_to} worker already"
    if worker.leaving or worker.health is not Health.UP:
        return f"it is {'leaving' if worker.leaving else worker.health}; only a healthy worker changes its role"
    for model in () if force else worker.models or ("",):
        if all(other is worker for other in table.pool(worker.role, model)):
            which = f"the last healthy {worker.role} worker{model and f' of {model!r}'}"
            return f"it is {which}; force the switch, or add a worker"
    return ""


def progress(table: WorkerTable, worker: Worker, role: Role, *, was: str) -> SwitchProgress:
    """`was`: the former incarnation."""
    if worker not in table:
        return SwitchProgress.REMOVED
    if worker.health is Health.DOWN and worker.checks.last is Check.REFUSED:
        return SwitchProgress.ENDED  # a switching worker keeps its port
    if worker.health is not Health.UP:
        return SwitchProgress.UNDER_WAY
    if worker.role is role:
        return SwitchProgress.THERE
    role_is_read = worker.checks.good_s >= worker.process.seen_s  # by the first check of this incarnation
    if worker.process.incarnation not in ("", was) and role_is_read:
        return SwitchProgress.WENT_BACK
    return SwitchProgress.UNDER_WAY
