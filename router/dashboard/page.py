"""Routes of the dashboard, polled by the page with a key."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from router.config import RouterConfig
from router.dashboard.snapshot import draw, merge
from router.fleet.peer_processes import PeerProcesses
from router.history.recorder import Recorder
from router.history.records import DashboardSnapshot
from router.pool.workers import WorkerTable
from router.requests.live import LiveRequests
from service.http.errors import ApiError
from service.http.json_depth import decode_or_none
from service.http.stream import json_response

STATE, SNAPSHOT, REQUEST = "/dashboard/state", "/dashboard/snapshot", "/dashboard/requests/"


@dataclass(eq=False, kw_only=True)
class Dashboard:
    """Handlers. `auto_roles` returns /auto_roles, if on."""

    config: RouterConfig
    table: WorkerTable
    recorder: Recorder
    live: LiveRequests
    num_running: Callable[[], int]
    peers: PeerProcesses
    auto_roles: Callable[[], Awaitable[bytes]] | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(STATE, self.state),
            web.get(SNAPSHOT, self.snapshot),
            web.get(REQUEST + "{key}", self.request),
        ]

    async def state(self, request: web.BaseRequest) -> web.Response:
        """Return the state of all processes, without request details."""
        now_s = self.recorder.now_s()
        memory = await self.memory()
        roles = None if self.auto_roles is None else msgspec.Raw(await self.auto_roles())
        picture = draw(memory, self.table.workers(), now_s=now_s)
        status = {"now_s": now_s, "wall_s": time.time(), "router": self._router(), "auto_roles": roles}
        return _fresh({**status, **picture})

    async def snapshot(self, request: web.BaseRequest) -> web.Response:
        return _fresh(self._own())

    async def request(self, request: web.BaseRequest) -> web.Response:
        key = request.path.removeprefix(REQUEST)
        for record in (await self.memory()).records:
            if record.key == key:
                return _fresh({"now_s": self.recorder.now_s(), "record": record})
        raise ApiError(404, f"no request {key} is remembered any more", code="not_found")

    async def memory(self) -> DashboardSnapshot:
        others = [decode_or_none(body, DashboardSnapshot) for body in await self.peers.request("GET", SNAPSHOT)]
        return merge([self._own(), *(snapshot for snapshot in others if snapshot is not None)])

    def _own(self) -> DashboardSnapshot:
        snapshot = self.recorder.snapshot()
        snapshot.switching = {
            worker.url: worker.switching_to.value for worker in self.table.workers() if worker.switching_to is not None
        }
        return snapshot

    def _router(self) -> dict[str, Any]:
        return {
            "pd": self.config.pd_disaggregation,
            "mixed": self.config.mixed,
            "policy": self.config.policy,
            "processes": self.config.workers,
            "running": self.num_running(),
            "draining": self.live.draining,
            "reports": self.config.load_poll_interval_s > 0,
        }


def _fresh(value: object) -> web.Response:
    return json_response(value, headers={"Cache-Control": "no-store"})
