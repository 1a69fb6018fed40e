"""Routes of workers, router settings, and the OpenAPI document."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response

from router.config import RouterConfig, check_worker_url
from router.fleet import PeerProcesses
from router.http.openapi import WORKERS
from router.http.worker_calls import WorkerCalls
from router.pool.discovery import Discovery
from router.pool.health import HealthMonitor
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.roles.switch import Switch
from service.flags import ConfigError
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import ApiError, bad_field, read_body
from service.http.request import HttpRequest
from service.http.routes import delete, get, json_response, post
from service.security.keys import authorization_of

# ---- Descriptions of workers.

BELOW = "/workers/"
SLICE = 50  # workers between two yields to other tasks

_encode = msgspec.json.Encoder().encode


async def describe_all(table: WorkerTable) -> msgspec.Raw:
    """A JSON list, yielding in between (milliseconds for a thousand)."""
    parts, workers = [], table.workers()
    for at in range(0, len(workers), SLICE):
        parts.append(_encode([describe(worker, table.misfits) for worker in workers[at : at + SLICE]])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def describe(worker: Worker, misfits: Mapping[int, str]) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "url": worker.url,
        "role": worker.role.value,
        "is_healthy": worker.answers,
        "health": worker.health.value,
        "silent": worker.silent,
        "heartbeats": worker.beats,
        "busy_s": worker.process.busy_s,
        "paused": worker.process.paused or None,
        "incompatible": misfits.get(worker.worker_id),
        "serves_whole": worker.serves_whole,
        "leaving": worker.leaving,
        "switching_to": None if worker.switching_to is None else worker.switching_to.value,
        "circuit": worker.circuit.state.value,
        "models": worker.models,
        "runtime_type": worker.runtime_type,
        "discovered": worker.discovered,
        "last_error": worker.checks.error,
        "bootstrap_host": worker.bootstrap.host if worker.role is Role.PREFILL else None,
        "bootstrap_port": worker.bootstrap.port,
        "load": worker.load_tokens,
        "inflight_requests": worker.inflight_requests,
        "inflight_tokens": worker.inflight_tokens,
        "assigned_total": worker.assigned_total,
        "report": worker.report,
    }


# ---- bodies

_WORKER_TYPE = "Name of role in SGLang's router, where a unified worker is regular."


class NamedWorker(Body):
    url: str = required("Address of the worker, http://HOST:PORT.", "http://10.0.0.7:30000")

    def model_post_init(self, context: Any) -> None:
        try:
            check_worker_url("url", self.url)
        except ConfigError as err:
            raise ApiError(400, str(err), field="url") from None


class NewWorker(NamedWorker):
    """A worker to add. `worker_type` is SGLang's name of `role`."""

    role: str | None = optional(
        "unified, prefill, decode or encode. May be left out where the router has one role of workers.", "prefill"
    )
    worker_type: str | None = optional(_WORKER_TYPE, "prefill")
    bootstrap_port: int | None = optional(
        "Port of a prefill worker's bootstrap server. Default: as the worker says.", 8998, ge=1, le=65535
    )


class RoleSwitchBody(NamedWorker):
    role: str | None = optional("prefill or decode: the role that the worker takes.", "decode")
    worker_type: str | None = optional(_WORKER_TYPE, "decode")
    force: bool | None = optional(
        "True: switches the last worker of its role, too. Default false.", False, default=False
    )
    timeout: float | None = optional(
        "Seconds for running requests to end. Default: the worker's --drain-timeout.", 30, ge=0
    )


# ---- workers api

_ROLE_WORDS = {"regular": "unified", "null": "unified"}  # SGLang's router calls a unified worker regular


@dataclass(eq=False)
class WorkersApi:
    calls: WorkerCalls
    config: RouterConfig
    monitor: HealthMonitor
    switch: Switch
    peers: PeerProcesses
    discovery: Discovery | None

    def api(self) -> ApiRouter:
        return ApiRouter(
            WORKERS,
            [
                get("/workers", self.list_workers),
                post("/workers", self.add_worker, body=NewWorker),
                delete("/workers", self.remove_worker, body=NamedWorker, body_required=False),
                delete(BELOW + "{worker}", self.remove_by_path),
                post("/workers/role", self.switch_role, body=RoleSwitchBody),
                post("/workers/migrate", self.migrate, body=NamedWorker),
                get("/get_loads", self.get_loads),
                get("/get_server_info", self.server_info, is_alias=True),
                get("/server_info", self.server_info),
            ],
        )

    async def list_workers(self, request: HttpRequest) -> Response:
        """List the workers with their states."""
        table = self.calls.table
        return json_response({"workers": await describe_all(table), "total": len(table.workers())})

    async def add_worker(self, request: HttpRequest) -> Response:
        """Add a worker."""
        body = read_body(await request.read(), NewWorker)
        role = self._role_of(body, Role.ENCODE)
        worker = self.calls.table.add(body.url, role=role, bootstrap_port=body.bootstrap_port, now_s=time.monotonic())
        self.monitor.watch(worker)
        await self.peers.forward(request, {"url": body.url, "role": role.value, "bootstrap_port": body.bootstrap_port})
        return json_response(self._describe(worker), status=201)

    async def remove_worker(self, request: HttpRequest) -> Response:
        """Remove a worker; its running requests continue."""
        query = dict(request.query)
        named = read_body(msgspec.json.encode(query) if query else await request.read(), NamedWorker)
        return await self._remove(request, named.url)

    async def remove_by_path(self, request: HttpRequest) -> Response:
        """Remove a worker by its id or URL, as SGLang's router does."""
        named = request.path.removeprefix(BELOW).rstrip("/")
        if named.isdecimal() and self.config.workers > 1:
            raise bad_field("worker", "ids differ between this router's processes; give the worker's URL")
        for worker in self.calls.table.workers():
            if named in (str(worker.worker_id), worker.url.replace("//", "/")):  # as `request.path` has slashes
                return await self._remove(request, worker.url)
        raise ApiError(404, f"worker: no worker has the id or URL {named}; GET /workers lists them", field="worker")

    async def _remove(self, request: HttpRequest, url: str) -> Response:
        worker = self.calls.table.remove(url)
        self.monitor.retire(worker)
        await self.peers.forward(request, {"url": url})
        return json_response(self._describe(worker))

    async def switch_role(self, request: HttpRequest) -> Response:
        """Change the role of a worker.

        409 if it is refused, 502 if the worker did not return.
        """
        body = read_body(await request.read(), RoleSwitchBody)
        role, worker = self._role_of(body), self.calls.table.find(body.url)
        if self.peers.is_peer(request):  # the peer switches it
            self.monitor.look(worker)
            return json_response(self._describe(worker))
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        await self.switch.move(worker, role, force=bool(body.force), drain_s=body.timeout, headers=headers)
        return json_response(self._describe(worker))

    async def migrate(self, request: HttpRequest) -> Response:
        """Move the running requests of a worker to others.

        `moved` counts this process's.
        """
        body = read_body(await request.read(), NamedWorker)
        worker = self.calls.table.find(body.url)
        if not self.calls.table.has_others(worker):
            raise ApiError(409, f"url: no other {worker.role} worker answers", field="url")
        moved = self.monitor.move_calls(worker, "POST /workers/migrate")
        await self.peers.forward(request, {"url": body.url})
        return json_response({**self._describe(worker), "moved": moved})

    async def get_loads(self, request: HttpRequest) -> Response:
        """List the workers, as SGLang's router does for loads."""
        return json_response({"workers": await describe_all(self.calls.table)})

    async def server_info(self, request: HttpRequest) -> Response:
        """Describe the router and its workers."""
        return json_response(
            {
                "router_manager": True,
                "pd_disaggregation": self.config.pd_disaggregation,
                "mixed": self.config.mixed,
                "policy": self.config.default_policy,
                "service_discovery": None if self.discovery is None else self.discovery.status(),
                "workers": await describe_all(self.calls.table),
            }
        )

    def _describe(self, worker: Worker) -> dict[str, Any]:
        return describe(worker, self.calls.table.misfits)

    def _role_of(self, body: NewWorker | RoleSwitchBody, *others: Role) -> Role:
        alone, roles = self.calls.roles, [*self.calls.roles, *others]
        word = body.role or body.worker_type or (alone[0].value if len(alone) == 1 else None)
        named = _ROLE_WORDS.get(word or "", word)
        if named not in [role.value for role in roles]:
            raise bad_field("role", f"must be one of {', '.join(roles)}, got {word!r}")
        return Role(named)
