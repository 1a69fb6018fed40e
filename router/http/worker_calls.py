"""Operators' calls to one or all workers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec
from fastapi import Response

from router.client.credentials import Credentials
from router.client.session import CALL_TIMEOUT_S, WorkerAnswer, call_worker
from router.pool.breaker import Health
from router.pool.reports import VLLM, lack_of, lacks_route, vllm_call
from router.pool.worker import Role, Way, Worker
from router.pool.workers import WorkerTable, missing_roles, serves
from router.requests.answer import no_route, no_worker
from service.http.guard import CALLER_HEADER
from service.http.request import HttpRequest
from service.http.routes import json_response
from service.security.keys import authorization_of


@dataclass(frozen=True)
class OperatorCall:
    """A call to workers: with `model` only to those that serve it, perhaps without `encoders`.

    `bodies`: by URL of a worker, instead of `body`.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    timeout_s: float = CALL_TIMEOUT_S
    model: str = ""
    encoders: bool = True
    bodies: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class WorkerCalls:
    session: aiohttp.ClientSession
    table: WorkerTable
    credentials: Credentials
    ways: tuple[Way, ...]

    @property
    def roles(self) -> list[Role]:
        return [role for way in self.ways for role in way]

    async def call_one(self, request: HttpRequest, *, model: str = "", path: str = "") -> Response:
        """Pass a request to the first live worker, decode first."""
        call = OperatorCall(
            "POST" if request.method == "POST" else "GET",
            path or request.path,
            self.credentials.for_client(authorization_of(request.headers)),
            await request.read(),
        )
        for role in reversed(self.roles):
            for worker in tuple(self.table.pool(role, model)):
                answer = await self._send(call, worker)
                if lacks_route(answer.status, answer.body):
                    raise no_route(worker, request.path)
                if answer.status:
                    return Response(status_code=answer.status, content=answer.body, headers=answer.headers)
        raise no_worker(self.table, missing_roles(self.table, self.ways, model) or self.roles, model)

    async def call_all(self, call: OperatorCall) -> Response:
        """Call all live workers; return the worst status and all answers."""
        answers = await self.answers(call)
        if call.model and not answers:
            raise no_worker(self.table, self.roles, call.model)
        status = max((a.status or 502 for _, a in answers), default=503)
        results = [
            {"url": w.url, "role": w.role.value, "status": a.status, "answer": a.body.decode(errors="replace")}
            for w, a in answers
        ]
        return json_response({"success": status == 200, "workers": results}, status=status)

    async def answers(self, call: OperatorCall) -> list[tuple[Worker, WorkerAnswer]]:
        known = [w for w in self.callable_workers() if not call.model or serves(w.models, call.model)]
        workers = [w for w in known if call.encoders or w.role is not Role.ENCODE]
        answers = zip(workers, await asyncio.gather(*(self._send(call, w) for w in workers)), strict=True)
        return [(worker, _without_lack(worker, call.path, answer)) for worker, answer in answers]

    def callable_workers(self) -> list[Worker]:
        return [w for w in self.table.workers() if w.health in (Health.UP, Health.DRAINING)]

    async def _send(self, call: OperatorCall, worker: Worker) -> WorkerAnswer:
        method, path, body = call.method, call.path, call.bodies.get(worker.url, call.body)
        if worker.runtime_type == VLLM:
            method, path, body = vllm_call(method, path, body)
        return await call_worker(self.session, method, worker.url + path, call.headers, body, timeout_s=call.timeout_s)

    async def abort(self, headers: Mapping[str, str], rid: str) -> None:
        shown = {name: headers[name] for name in ("Authorization", CALLER_HEADER) if name in headers}
        await self.answers(OperatorCall("POST", "/abort_request", shown, msgspec.json.encode({"rid": rid})))


def _without_lack(worker: Worker, path: str, answer: WorkerAnswer) -> WorkerAnswer:
    if not lacks_route(answer.status, answer.body):
        return answer
    return WorkerAnswer(501, lack_of(worker.runtime_type, path).encode(), {})
