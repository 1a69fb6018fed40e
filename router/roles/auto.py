"""Auto roles: reads the pools at intervals, and carries out the controller's switches."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Response

from router.config import AutoRolesFlags
from router.fleet import PeerProcesses
from router.history.metrics import RouterMetrics
from router.pool.worker import Worker
from router.pool.workers import WorkerTable
from router.roles.controller import Controller, Gauge, Move, Standing
from router.roles.switch import Switch, SwitchFailed, SwitchRefused
from service.http.api import ApiRouter
from service.http.request import HttpRequest
from service.http.routes import Tag, get
from service.waiter import end_tasks, loop_time_s

log = logging.getLogger(__name__)

PATH = "/auto_roles"
KEPT_MOVES = 32


class MoveRecord(msgspec.Struct):
    """A switch in `/auto_roles`, on the loop's clock."""

    url: str
    model: str
    to_role: str
    reason: str
    began_s: float
    seconds: float | None = None
    result: str | None = None


ROLES = Tag("Auto roles", "Workers that change their roles with the load.")


@dataclass(eq=False, kw_only=True)
class AutoRoles:
    """Auto roles; only the process that `leads` switches workers."""

    config: AutoRolesFlags
    table: WorkerTable
    mover: Switch
    metrics: RouterMetrics
    peers: PeerProcesses
    leads: bool
    _moves: deque[MoveRecord] = field(default_factory=lambda: deque(maxlen=KEPT_MOVES))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.controller, self._gauge = Controller(self.config), Gauge(self.config)
        self._runs = self.config.auto_roles and self.leads

    def start(self) -> None:
        if self._runs:
            self._spawn(self._run(), "auto roles")

    async def close(self) -> None:
        """Workers complete running switches."""
        await end_tasks(self._tasks)

    def api(self) -> ApiRouter:
        return ApiRouter(ROLES, [get(PATH, self.handle)])

    async def handle(self, request: HttpRequest) -> Response:
        is_peer = self.peers.is_peer(request)
        body = msgspec.json.encode(self.status()) if is_peer else await self.leading_status()
        return Response(content=body, media_type="application/json")

    async def leading_status(self) -> bytes:
        if self.config.auto_roles and not self._runs:
            answers = await self.peers.request("GET", PATH)
            leading = next((answer for answer in answers if msgspec.json.decode(answer)["runs"]), None)
            if leading is not None:
                return leading
        return msgspec.json.encode(self.status())

    def status(self) -> dict[str, Any]:
        """Pressures (1: at capacity) by model, and switches."""
        now_s = loop_time_s()
        return {
            "enabled": self.config.auto_roles,
            "runs": self._runs,
            "now_s": now_s,
            "enter": self.config.auto_roles_enter,
            "leave": self.config.auto_roles_leave,
            "models": {model: _view(standing, now_s) for model, standing in self.controller.standings.items()},
            "moves": list(reversed(self._moves)),
        }

    def tick(self) -> None:
        now_s = loop_time_s()
        seen = self._gauge.read(self.table.workers(), now_s)
        for move in self.controller.tick(now_s, seen):
            worker = next(worker for worker in self.table.workers() if worker.worker_id == move.worker_id)
            self._spawn(self._carry_out(move, worker), f"move {worker.url}")
        for model, standing in self.controller.standings.items():
            for role, pressure in standing.pressure.items():
                self.metrics.on_pressure(model, role, pressure)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.config.auto_roles_interval_s)
            try:
                self.tick()
            except Exception:  # the next round may succeed; requests do not depend on it
                log.exception("auto roles: a look at the pools failed")

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, move: Move, worker: Worker) -> None:
        began_s = loop_time_s()
        record = MoveRecord(worker.url, move.model, move.to_role.value, move.reason, began_s)
        self._moves.append(record)
        log.info("auto roles: %s worker %s moves to %s: %s", worker.role, worker.url, move.to_role, move.reason)
        result = "failed"
        try:
            await self.mover.move(worker, move.to_role)
            result = "moved"
        except (SwitchRefused, SwitchFailed) as err:
            result = "refused" if isinstance(err, SwitchRefused) else "failed"
            verb = "was refused" if isinstance(err, SwitchRefused) else "failed"
            log.warning("auto roles: the move of %s to %s %s: %s", worker.url, move.to_role, verb, err)
        except Exception:
            log.exception("auto roles: the move of %s to %s failed", worker.url, move.to_role)
        finally:
            record.seconds, record.result = loop_time_s() - began_s, result
            self.controller.ended(move, ok=result == "moved", now_s=loop_time_s())
            self.metrics.role_moves.labels(move.model, move.to_role.value, result).inc()
        if result == "moved":
            log.info("auto roles: %s serves as %s after %.1f s", worker.url, move.to_role, record.seconds)


def _view(standing: Standing, now_s: float) -> dict[str, Any]:
    return {
        "pressure": {role.value: pressure for role, pressure in standing.pressure.items()},
        "short_for_s": {role.value: now_s - since_s for role, since_s in standing.short_since.items()},
        "moving": None if standing.moving is None else standing.moving.to_role.value,
        "expected_move_s": standing.move_s,
        "verdict": standing.verdict,
    }
