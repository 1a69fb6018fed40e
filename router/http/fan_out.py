"""Routes for all workers: cache, pause, weights, memory, profiles, adapters, aborts."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Response

from router.client.session import CALL_TIMEOUT_S, call_worker
from router.fleet import PeerProcesses
from router.http.openapi import MODELS, OPERATIONS, WORKERS, PassedRoute, passed
from router.http.worker_calls import OperatorCall, WorkerCalls
from router.pool.health import HealthMonitor
from router.pool.reports import count_of
from router.pool.worker import Worker
from router.pool.workers import join_models
from router.requests.dispatch import LiveRequests
from service.flags import untagged
from service.http.api import ApiRouter, loads_answer
from service.http.errors import ApiError, decode_or_none, object_of
from service.http.guard import caller_header, has_admin_key, key_refusal
from service.http.request import HttpRequest, segment
from service.http.routes import get, json_response
from service.security.keys import Access, KeyGate, authorization_of
from service.waiter import BODIES

UPDATE_TIMEOUT_S = 3600.0  # weights come from a disk, and running requests may finish first
UPDATES = tuple(f"/update_weights_from_{source}" for source in ("disk", "tensor", "distributed"))
JOIN_GROUP, LEAVE_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"
EXPERTS = ("/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record")
TIMEOUTS_S = {  # of POSTs that are passed on unchanged
    "/flush_cache": CALL_TIMEOUT_S,
    PAUSE: CALL_TIMEOUT_S,
    CONTINUE: CALL_TIMEOUT_S,
    "/start_profile": CALL_TIMEOUT_S,
    "/stop_profile": CALL_TIMEOUT_S,
    **dict.fromkeys(EXPERTS, CALL_TIMEOUT_S),
    **dict.fromkeys((*UPDATES, LEAVE_GROUP), UPDATE_TIMEOUT_S),
    **dict.fromkeys(("/begin_weight_update", "/end_weight_update", "/update_weight_version"), CALL_TIMEOUT_S),
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

    def api(self) -> ApiRouter:
        return ApiRouter(
            OPERATIONS,
            [
                *(passed(path, self.pass_to_all) for path in TIMEOUTS_S if path not in (PAUSE, CONTINUE)),
                passed(JOIN_GROUP, self.join_group),
                passed(PAUSE, self.pause),
                passed(CONTINUE, self.unpause),
                PassedRoute("GET", "/flush_cache", self.pass_to_all),
                *(passed(path, self.pass_adapter) for path in (LOAD_ADAPTER, UNLOAD_ADAPTER)),
                passed("/abort_request", self.abort_request),
                *(passed(path, self.pass_to_computing) for path in ("/close_session", "/expect_return")),
                get("/health_generate", self.health_generate),
            ],
        )

    async def pass_to_all(self, request: HttpRequest) -> Response:
        headers, path = self.calls.credentials.for_admin(authorization_of(request.headers)), request.path
        body, timeout_s = await request.read(), TIMEOUTS_S[path]
        encoders = path not in EXPERTS
        answer = await self.calls.call_all(
            OperatorCall("POST", path, headers, body, timeout_s=timeout_s, encoders=encoders)
        )
        if path in (PAUSE, CONTINUE, *UPDATES, RELEASE, RESUME):
            self.monitor.refresh()  # model names and health may have changed
        return answer

    async def join_group(self, request: HttpRequest) -> Response:
        """Let all workers join a trainer's process group, with ranks from `rank_offset` on, in the
        order of /workers.
        """
        fields, bodies = object_of(await request.read()), {}
        first = next_rank = count_of(fields.get("rank_offset"))
        for worker in self.calls.callable_workers():
            bodies[worker.url] = msgspec.json.encode({**fields, "rank_offset": next_rank})
            next_rank += worker.ranks.count
        if fields.get("world_size") != next_rank:
            text = (
                f"with {next_rank - first} ranks of {len(bodies)} workers from rank {first} on it must be {next_rank}"
            )
            raise ApiError(400, f"world_size: {text}", field="world_size")
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        call = OperatorCall("POST", JOIN_GROUP, headers, bodies=bodies, timeout_s=UPDATE_TIMEOUT_S)
        return await self.calls.call_all(call)

    async def pause(self, request: HttpRequest) -> Response:
        """Pause all workers. Mode `block` first holds new requests in all processes and waits for
        running ones, so that no pair has half a request.
        """
        if object_of(await request.read()).get("mode") == "block":
            body = {"mode": "block"}
            await asyncio.gather(self.live.block(), self.peers.forward(request, body, timeout_s=UPDATE_TIMEOUT_S))
            if self.peers.is_peer(request):
                return json_response({"success": True})
        return await self.pass_to_all(request)

    async def unpause(self, request: HttpRequest) -> Response:
        """Continue all workers, then admit waiting requests."""
        answer = None if self.peers.is_peer(request) else await self.pass_to_all(request)
        self.live.unblock()
        await self.peers.forward(request, {})
        return json_response({"success": True}) if answer is None else answer

    async def pass_adapter(self, request: HttpRequest) -> Response:
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
            OperatorCall("POST", path, headers, body, timeout_s=UPDATE_TIMEOUT_S, model=model, encoders=False)
        )
        self.monitor.refresh()  # model names have changed
        return answer

    async def abort_request(self, request: HttpRequest) -> Response:
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
        return await self.calls.call_all(OperatorCall("POST", "/abort_request", headers, body))

    async def pass_to_computing(self, request: HttpRequest) -> Response:
        body, shown = await request.read(), self.calls.credentials.for_client(authorization_of(request.headers))
        headers = {**shown, **caller_header(request)}
        return await self.calls.call_all(OperatorCall("POST", request.path, headers, body, encoders=False))

    async def health_generate(self, request: HttpRequest) -> Response:
        """Let all workers compute a token."""
        return await self.calls.call_all(OperatorCall("GET", "/health_generate", self.calls.credentials.own()))


# ---- Routes that any worker of a model answers: models, tokenizer, prompt costs.

_MODEL = "/v1/models/"
ASKED = (  # POST, with the model in the body
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/v1/completions/render", "/v1/chat/completions/render", "/api/show"),
)
_ALIASES = ("/v1/tokenize", "/v1/detokenize")
DESCRIBED = ("/get_model_info", "/model_info", "/api/version", "/get_weight_version")
LISTS = {  # fields of the rows, and of a row's name
    "/v1/models": ("data", "id"),
    "/api/tags": ("models", "name"),
    "/api/ps": ("models", "name"),
}


class _Named(msgspec.Struct):
    model: Any = msgspec.UNSET
    name: Any = None


@dataclass(eq=False)
class AnyWorkerApi:
    calls: WorkerCalls

    def api(self) -> ApiRouter:
        return ApiRouter(
            MODELS,
            [
                *(passed(path, self.ask) for path in ASKED),
                *(passed(path, self.ask, is_alias=True) for path in _ALIASES),
                *(PassedRoute("GET", path, self.calls.call_one) for path in DESCRIBED),
                *(PassedRoute("GET", path, self.list_models) for path in LISTS),
                PassedRoute("GET", _MODEL + "{model}", self.get_model),
            ],
        )

    async def ask(self, request: HttpRequest) -> Response:
        body = await request.read()
        named = await BODIES.run(partial(decode_or_none, body, _Named), size=len(body)) or _Named()
        name = named.name if named.model is msgspec.UNSET else named.model
        return await self._call_for(request, untagged(name) if isinstance(name, str) else "")

    async def get_model(self, request: HttpRequest) -> Response:
        name = request.path.removeprefix(_MODEL)
        return await self._call_for(request, name, path=_MODEL + segment(name))

    async def list_models(self, request: HttpRequest) -> Response:
        if not self.calls.table.models.several:
            return await self.calls.call_one(request)
        field, key = LISTS[request.path]
        models = join_models(await self._lists(request), field=field, key=key)
        return json_response({"object": "list", field: models} if field == "data" else {field: models})

    async def _lists(self, request: HttpRequest) -> list[object]:
        headers = self.calls.credentials.for_client(authorization_of(request.headers))
        speakers: dict[str, Worker] = {}
        for role in reversed(self.calls.roles):
            for worker in self.calls.table.alive(role):
                speakers.setdefault(worker.model, worker)
        calls = (call_worker(self.calls.session, "GET", w.url + request.path, headers) for w in speakers.values())
        return [decode_or_none(answer.body) for answer in await asyncio.gather(*calls)]

    async def _call_for(self, request: HttpRequest, name: str, *, path: str = "") -> Response:
        return await self.calls.call_one(request, model=self.calls.table.models.meant(name), path=path)


# ---- GET /v1/loads and /get_load: all workers as the DP ranks of one SGLang server.

LOADS = ("/v1/loads", "/loads")  # SMG tries the second first


@dataclass(eq=False)
class LoadsApi:
    calls: WorkerCalls

    def api(self) -> ApiRouter:
        return ApiRouter(
            WORKERS,
            [get(LOADS[0], self.loads), get(LOADS[1], self.loads, is_alias=True), get("/get_load", self.old_load)],
        )

    async def loads(self, request: HttpRequest) -> Response:
        """Return the load of each rank of each worker."""
        rows = await self._rows(request)
        return json_response(loads_answer(rows))

    async def old_load(self, request: HttpRequest) -> Response:
        """Return the load of each rank, as SGLang did before."""
        return json_response([old_row(row) for row in await self._rows(request)])

    async def _rows(self, request: HttpRequest) -> list[dict[str, Any]]:
        headers = self.calls.credentials.for_client(authorization_of(request.headers))
        answers = await self.calls.answers(OperatorCall("GET", "/v1/loads", headers))
        return join_rows((w.url, w.role.value, object_of(a.body)) for w, a in answers if a.status == 200)


def join_rows(answers: Iterable[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join the rows of (url, role, answer), with consecutive ranks."""
    rows: list[dict[str, Any]] = []
    for url, role, answer in answers:
        loads = answer.get("loads")
        for row in loads if isinstance(loads, list) else []:
            if isinstance(row, dict):
                rows.append({**row, "dp_rank": len(rows), "worker": url, "role": role})
    return rows


def old_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of /get_load, whose waiting requests include all queues, as in SGLang."""
    waiting = count_of(row.get("num_queued_reqs", row.get("num_waiting_reqs")))
    return {
        "dp_rank": row["dp_rank"],
        "num_reqs": count_of(row.get("num_running_reqs")) + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": count_of(row.get("num_used_tokens")),
        "worker": row["worker"],
        "role": row["role"],
    }
