"""Routes that every worker answers: cache, pause, weights, memory, profiles, adapters, aborts."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from router.client.session import CALL_TIMEOUT_S
from router.fleet.peer_processes import PeerProcesses
from router.http.worker_calls import WorkerCalls
from router.pool.health import HealthMonitor
from router.requests.live import LiveRequests
from service.aside import BODIES
from service.http.caller_names import caller_header, has_admin_key
from service.http.errors import ApiError
from service.http.guard import key_refusal
from service.http.json_depth import decode_or_none, object_of
from service.http.stream import json_response
from service.security.keys import Access, KeyGate, authorization_of

UPDATE_TIMEOUT_S = 3600.0  # weights come from a disk, and running requests may finish first
UPDATE_WEIGHTS = "/update_weights_from_disk"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"
EXPERTS = (
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)
TIMEOUTS_S = {  # of POSTs that go to all workers as they are
    "/flush_cache": CALL_TIMEOUT_S,
    PAUSE: CALL_TIMEOUT_S,
    CONTINUE: CALL_TIMEOUT_S,
    "/start_profile": CALL_TIMEOUT_S,
    "/stop_profile": CALL_TIMEOUT_S,
    **dict.fromkeys(EXPERTS, CALL_TIMEOUT_S),
    UPDATE_WEIGHTS: UPDATE_TIMEOUT_S,
    RELEASE: CALL_TIMEOUT_S,
    RESUME: UPDATE_TIMEOUT_S,
}


class _Abort(msgspec.Struct):
    abort_all: Any = None


@dataclass(eq=False)
class FanOutApi:
    calls: WorkerCalls
    monitor: HealthMonitor
    gate: KeyGate
    live: LiveRequests
    peers: PeerProcesses

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self.pass_to_all) for path in TIMEOUTS_S if path not in (PAUSE, CONTINUE)),
            web.post(PAUSE, self.pause),
            web.post(CONTINUE, self.unpause),
            web.get("/flush_cache", self.pass_to_all),
            *(web.post(path, self.pass_adapter) for path in (LOAD_ADAPTER, UNLOAD_ADAPTER)),
            web.post("/abort_request", self.abort_request),
            web.get("/health_generate", self.health_generate),
        ]

    async def pass_to_all(self, request: web.BaseRequest) -> web.Response:
        """All workers act at the same time; encoder workers have no experts."""
        headers, path = self.calls.credentials.for_admin(authorization_of(request.headers)), request.path
        body, timeout_s = await request.read(), TIMEOUTS_S[path]
        encoders = path not in EXPERTS
        answer = await self.calls.call_all("POST", path, headers, body, timeout_s=timeout_s, encoders=encoders)
        if path in (UPDATE_WEIGHTS, RELEASE, RESUME):
            self.monitor.refresh()  # the models may have other names, the workers another health
        return answer

    async def pause(self, request: web.BaseRequest) -> web.Response:
        """Pass to all. The mode `block` holds new requests in all processes of the router first, and waits until the others have ended.

        So no worker has a request of which another one knows nothing yet.
        """
        if object_of(await request.read()).get("mode") == "block":
            body = {"mode": "block"}
            await asyncio.gather(self.live.block(), self.peers.forward(request, body, timeout_s=UPDATE_TIMEOUT_S))
            if self.peers.is_peer(request):
                return json_response({"success": True})
        return await self.pass_to_all(request)

    async def unpause(self, request: web.BaseRequest) -> web.Response:
        """Pass to all, then let the requests in that waited."""
        answer = None if self.peers.is_peer(request) else await self.pass_to_all(request)
        self.live.unblock()
        await self.peers.forward(request, {})
        return json_response({"success": True}) if answer is None else answer

    async def pass_adapter(self, request: web.BaseRequest) -> web.Response:
        """Load or unload an adapter at the workers of one model: if there are several, `model` names it (to unload: the model that has it).

        Encoder workers have none.
        """
        body, path = await request.read(), request.path
        fields = object_of(body)  # workers refuse a body that is no object
        try:
            model = self.calls.table.models.of_adapter(
                model=fields.get("model"), adapter=fields.get("lora_name"), loads=path == LOAD_ADAPTER
            )
        except ValueError as err:
            raise ApiError(400, str(err), field="model") from None
        if "model" in fields:  # the router's field: a worker has one model
            body = msgspec.json.encode({name: value for name, value in fields.items() if name != "model"})
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        answer = await self.calls.call_all(
            "POST", path, headers, body, timeout_s=UPDATE_TIMEOUT_S, model=model, encoders=False
        )
        self.monitor.refresh()  # names have come or gone
        return answer

    async def abort_request(self, request: web.BaseRequest) -> web.Response:
        """Pass to every worker: only they know request ids. An id is of the key that gave it; an admin's ends that of any key, or all at once."""
        body, authorization = await request.read(), authorization_of(request.headers)
        asked = await BODIES.run(partial(decode_or_none, body, _Abort), size=len(body))
        if asked is not None and asked.abort_all:
            if (refusal := key_refusal(request, self.gate, Access.ADMIN)) is not None:
                raise refusal
            headers = self.calls.credentials.for_admin(authorization)
        elif has_admin_key(request, self.gate):
            headers = self.calls.credentials.for_admin(authorization)
        else:
            headers = {**self.calls.credentials.for_client(authorization), **caller_header(request)}
        return await self.calls.call_all("POST", "/abort_request", headers, body)

    async def health_generate(self, request: web.BaseRequest) -> web.Response:
        return await self.calls.call_all("GET", "/health_generate", self.calls.credentials.own())
