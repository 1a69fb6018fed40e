"""Moves a worker from one role to the other: sends the request, and waits until the worker is in the other pool.

The health monitor sees the change, also of a worker that another caller has moved. What is allowed: rules.py.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.fleet.peer_processes import PeerProcesses
from router.pool.health import HealthMonitor
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.roles.rules import SwitchProgress, objection, progress
from service.http.json_depth import decode_or_none

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0
START_TIMEOUT_S = 900.0  # for the drain and for a model to be loaded
POLL_S = 0.2
PATH = "/workers/role"


class SwitchRefused(Exception):
    """The worker may not move, or cannot; nothing has changed."""


class SwitchFailed(Exception):
    """The worker accepted the change and did not come back in the other role."""


@dataclass(slots=True, kw_only=True)
class Switch:
    """Owns the moves that are under way."""

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
        """Return when `worker` serves as `role`. Raises `SwitchRefused`, `SwitchFailed`. A cancelled caller does not end the move.

        `force`: even if that empties its pool. `drain_s`: time for its requests; None: its --drain-timeout. `headers`: with the admin
        key to use; None: the router's.
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
        """Stop waiting; moves under way go on at the workers."""
        for task in self._moves:
            task.cancel()
        await asyncio.gather(*self._moves, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", task.get_name(), error)

    async def _move(self, worker: Worker, role: Role, drain_s: float | None, headers: dict[str, str]) -> None:
        try:
            was, old = worker.incarnation, worker.role
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
        try:
            async with self.session.post(
                worker.url + "/switch_role",
                data=msgspec.json.encode(body),
                headers={**headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise SwitchFailed(f"{worker.url} could not be reached: {str(err) or type(err).__name__}") from None
        if status in (404, 405):
            raise SwitchRefused(f"{worker.url} has no /switch_role: a worker of another make or version")
        if status not in (200, 202):
            raise SwitchRefused(f"{worker.url} answers {status}: {_message(answer)}")

    async def _until_there(self, worker: Worker, role: Role, *, was: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (now := progress(self.table, worker, role, was=was)) is SwitchProgress.UNDER_WAY:
                    self.monitor.look(worker)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise SwitchFailed(f"{worker.url} is not back after {timeout_s:g} s: {worker.last_error}") from None
        if now is SwitchProgress.WENT_BACK:
            raise SwitchFailed(f"{worker.url}: {now}: {await self._why(worker)}")
        if now is not SwitchProgress.THERE:
            raise SwitchFailed(f"{worker.url}: {now}: {worker.last_error}")

    async def _why(self, worker: Worker) -> str:
        """The reason that a worker reports for going back to its old role."""
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        try:
            async with self.session.get(
                worker.url + "/server_info", headers=self.credentials.own(), timeout=timeout, allow_redirects=False
            ) as response:
                info: _Info | None = decode_or_none(await response.read(), _Info)
        except (aiohttp.ClientError, OSError, TimeoutError):
            info = None
        last = None if info is None else info.last_switch
        return "it was restarted" if last is None or last.error is None else last.error

    async def _announce(self, worker: Worker, role: Role) -> None:
        """Have peers check the worker: no request of a client shows them the change."""
        await self.peers.request("POST", PATH, {"url": worker.url, "role": role.value})


class _LastSwitch(msgspec.Struct):
    error: str | None = None


class _Info(msgspec.Struct):
    last_switch: _LastSwitch | None = None


class _ErrorDetail(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetail


def _message(answer: bytes) -> str:
    """The message of an error in OpenAI's shape, else the beginning of the answer."""
    body: _Error | None = decode_or_none(answer, _Error)
    return answer[:200].decode(errors="replace") if body is None else body.error.message
