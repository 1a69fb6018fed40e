"""Routes for all workers: cache, pause, weights, memory, profiles, adapters, aborts."""

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
TIMEOUTS_S = {  # of POSTs that are passed on unchanged
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
        headers, path = self.calls.credentials.for_admin(authorization_of(request.headers)), request.path
        body, timeout_s = await request.read(), TIMEOUTS_S[path]
        encoders = path not in EXPERTS
        answer = await self.calls.call_all("POST", path, headers, body, timeout_s=timeout_s, encoders=encoders)
        if path in (UPDATE_WEIGHTS, RELEASE, RESUME):
            self.monitor.refresh()  # model names and health may have changed
        return answer

    async def pause(self, request: web.BaseRequest) -> web.Response:
        """Pause all workers. Mode `block` first holds new requests in all processes and waits for
        running ones, so that no pair has half a request.
        """
        if object_of(await request.read()).get("mode") == "block":
            body = {"mode": "block"}
            await asyncio.gather(self.live.block(), self.peers.forward(request, body, timeout_s=UPDATE_TIMEOUT_S))
            if self.peers.is_peer(request):
                return json_response({"success": True})
        return await self.pass_to_all(request)

    async def unpause(self, request: web.BaseRequest) -> web.Response:
        """Continue all workers, then admit waiting requests."""
        answer = None if self.peers.is_peer(request) else await self.pass_to_all(request)
        self.live.unblock()
        await self.peers.forward(request, {})
        return json_response({"success": True}) if answer is None else answer

    async def pass_adapter(self, request: web.BaseRequest) -> web.Response:
        """Load or unload an adapter at all workers of a model but encoders."""
        body, path = await request.read(), request.path
        fields = object_of(body)  # workers refuse a non-object
        try:
            model = self.calls.table.models.of_adapter(
                model=fields.get("model"), adapter=fields.get("lora_name"), loads=path == LOAD_ADAPTER
            )
        except ValueError as err:
            raise ApiError(400, str(err), field="model") from None
        if "model" in fields:  # only for the router
            body = msgspec.json.encode({name: value for name, value in fields.items() if name != "model"})
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        answer = await self.calls.call_all(
            "POST", path, headers, body, timeout_s=UPDATE_TIMEOUT_S, model=model, encoders=False
        )
        self.monitor.refresh()  # model names have changed
        return answer

    async def abort_request(self, request: web.BaseRequest) -> web.Response:
        """Abort at every worker. An admin may abort any request, others their own."""
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
