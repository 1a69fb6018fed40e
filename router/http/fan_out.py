"""Routes that every worker answers: cache, pause, weights, profiles, adapters, aborts."""

from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from router.http.worker_calls import CALL_TIMEOUT_S, WorkerCalls, authorization_of
from router.pool.health import HealthMonitor
from service.http.errors import error_response
from service.http.guard import key_refusal
from service.http.json_depth import JSON_ERRORS
from service.security.keys import Access, KeyGate

UPDATE_TIMEOUT_S = 3600.0  # weights come from a disk, and running requests may finish first


@dataclass(frozen=True, slots=True)
class _Passed:
    """A POST that goes to all workers. `renames`: their models may have other names then."""

    timeout_s: float = CALL_TIMEOUT_S
    renames: bool = False


PASSED = {
    "/flush_cache": _Passed(),
    "/pause_generation": _Passed(),
    "/continue_generation": _Passed(),
    "/start_profile": _Passed(),
    "/stop_profile": _Passed(),
    "/update_weights_from_disk": _Passed(UPDATE_TIMEOUT_S, renames=True),
}
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"


class FanOutApi:
    def __init__(self, calls: WorkerCalls, *, monitor: HealthMonitor, gate: KeyGate) -> None:
        self._calls = calls
        self._monitor = monitor
        self._gate = gate

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self.pass_to_all) for path in PASSED),
            web.get("/flush_cache", self.pass_to_all),
            *(web.post(path, self.pass_adapter) for path in (LOAD_ADAPTER, UNLOAD_ADAPTER)),
            web.post("/abort_request", self.abort_request),
            web.get("/health_generate", self.health_generate),
        ]

    async def pass_to_all(self, request: web.BaseRequest) -> web.Response:
        """Pass the body as it is; all workers act at the same time."""
        passed = PASSED[request.path]
        headers = self._calls.credentials.for_admin(authorization_of(request))
        answer = await self._calls.call_all(
            "POST", request.path, headers, await request.read(), timeout_s=passed.timeout_s
        )
        if passed.renames:
            self._monitor.refresh()
        return answer

    async def pass_adapter(self, request: web.BaseRequest) -> web.Response:
        """Load or unload an adapter at the workers of one model: of several, `model` names it (to unload: the one that has it)."""
        body = await request.read()
        decoded = _decoded(body)
        fields = decoded if isinstance(decoded, dict) else {}
        try:
            model = self._calls.table.models.of_adapter(
                model=fields.get("model"), adapter=fields.get("lora_name"), loads=request.path == LOAD_ADAPTER
            )
        except ValueError as err:
            return error_response(400, str(err), field="model")
        if "model" in fields:  # the router's field: a worker has one model
            body = msgspec.json.encode({key: value for key, value in fields.items() if key != "model"})
        headers = self._calls.credentials.for_admin(authorization_of(request))
        answer = await self._calls.call_all(
            "POST", request.path, headers, body, timeout_s=UPDATE_TIMEOUT_S, model=model
        )
        self._monitor.refresh()  # names have come or gone
        return answer

    async def abort_request(self, request: web.BaseRequest) -> web.Response:
        """Pass to every worker: only they know request ids. To abort all requests at once needs the admin key."""
        body = await request.read()
        headers = self._calls.credentials.for_client(authorization_of(request))
        decoded = _decoded(body)  # a body that is no JSON object is the workers' to refuse
        if isinstance(decoded, dict) and decoded.get("abort_all"):
            if (refusal := key_refusal(request, self._gate, Access.ADMIN)) is not None:
                raise refusal
            headers = self._calls.credentials.for_admin(authorization_of(request))
        return await self._calls.call_all("POST", "/abort_request", headers, body)

    async def health_generate(self, request: web.BaseRequest) -> web.Response:
        """Have every worker generate a token."""
        return await self._calls.call_all("GET", "/health_generate", self._calls.credentials.own())


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except JSON_ERRORS:
        return None
