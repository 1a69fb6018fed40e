"""Routes beside generation: health of the router, what is behind it, changes of the pool, calls to every worker."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web

from router.client.credentials import Credentials
from router.config import RouterConfig, check_worker_url
from router.fleet.siblings import Siblings, merge_expositions
from router.http.openapi import make_document
from router.metrics import RouterMetrics
from router.pool.discovery import Discovery
from router.pool.health import HealthMonitor
from router.pool.models import join_models, serves
from router.pool.states import Health
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, missing_roles
from router.requests.live import LiveRequests
from router.requests.replies import no_worker_message
from router.roles.switch import Switch, SwitchFailed, SwitchRefused
from service.flags import ConfigError
from service.http.errors import DRAINING, ApiError, error_response
from service.http.guard import key_refusal
from service.http.json_depth import JSON_ERRORS
from service.http.stream import json_response
from service.security.keys import Access, KeyGate
from service.telemetry.records import Record, Records, TracesQuery, last_ids, query_error
from service.telemetry.tracer import Tracer

FAN_OUT_TIMEOUT_S = 30.0
TRACES_TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 3600.0  # weights come from a disk, and running requests may finish first
PASSED_TO_ALL = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/start_profile",
    "/stop_profile",
)
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"

_MODEL = "/v1/models/"
_ROLE_WORDS = {"regular": "unified", "null": "unified"}  # SGLang's router calls a unified worker regular


class Control:
    """Handlers; owns nothing."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        table: WorkerTable,
        monitor: HealthMonitor,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        gate: KeyGate,
        credentials: Credentials,
        roles: tuple[Role, ...],
        live: LiveRequests,
        siblings: Siblings,
        tracer: Tracer,
        switch: Switch,
        discovery: Discovery | None = None,
    ) -> None:
        self._switch = switch
        self._tracer = tracer
        self._siblings = siblings
        self._config = config
        self._table = table
        self._monitor = monitor
        self._session = session
        self._metrics = metrics
        self._gate = gate
        self._credentials = credentials
        self._roles = roles
        self._live = live
        self._discovery = discovery

    def routes(self) -> list[web.RouteDef]:
        """All routes of this module."""
        return [
            web.get("/liveness", self.liveness),
            web.get("/health", self.readiness),
            web.get("/readiness", self.readiness),
            web.get("/health_generate", self.health_generate),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{model}", self.get_model),
            web.get("/get_model_info", self.proxy),
            web.get("/model_info", self.proxy),
            web.get("/get_server_info", self.server_info),
            web.get("/server_info", self.server_info),
            web.get("/workers", self.list_workers),
            web.post("/workers", self.add_worker),
            web.delete("/workers", self.remove_worker),
            web.post("/workers/role", self.switch_role),
            web.get("/get_loads", self.get_loads),
            web.get("/flush_cache", self.flush_cache),
            web.post("/flush_cache", self.flush_cache),
            web.post("/abort_request", self.abort_request),
            *(web.post(path, self.pass_to_all) for path in PASSED_TO_ALL),
            *(web.post(path, self.pass_adapter) for path in (LOAD_ADAPTER, UNLOAD_ADAPTER)),
            web.get("/metrics", self.get_metrics),
            web.post("/traces", self.traces),
            web.get("/openapi.json", self.openapi),
        ]

    async def liveness(self, request: web.BaseRequest) -> web.Response:
        """The process runs."""
        return json_response({"status": "alive"})

    async def readiness(self, request: web.BaseRequest) -> web.Response:
        """200 if a request would find its workers, else 503 naming the role that is missing (or that we drain).

        `?workers=all`: 200 only once every worker of the table is healthy, in every process of the router. The launcher
        waits for this: a cluster whose first requests go to the workers that happened to be checked first is not ready.
        """
        if self._live.draining:
            body = {"status": DRAINING, "num_live_reqs": len(self._live)}
            answer = json_response(body, status=503)
            answer.headers["Retry-After"] = "1"
            return answer
        workers = self._table.workers()
        missing = missing_roles(self._table, self._roles)
        if missing:
            return error_response(503, no_worker_message(self._table, missing), code="no_worker")
        healthy = sum(w.answers for w in workers)
        if request.rel_url.query.get("workers") == "all" and (waits_for := await self._waits_for(request, workers)):
            return error_response(503, waits_for, code="not_all_healthy")
        return json_response({"status": "ready", "healthy_workers": healthy, "total_workers": len(workers)})

    async def _waits_for(self, request: web.BaseRequest, workers: Sequence[Worker]) -> str:
        """What keeps `?workers=all` waiting; "" if nothing does. A sibling answers for itself alone."""
        late = [f"{w.role} {w.url} is {w.health}" for w in workers if not w.answers]
        if late:
            return f"{len(late)} of {len(workers)} workers are not healthy: {', '.join(late)}"
        if self._siblings.is_one(request):
            return ""
        num_late = self._siblings.num - len(await self._siblings.answers("/readiness?workers=all"))
        return f"{num_late} other processes of this router do not know every worker as healthy yet" if num_late else ""

    async def health_generate(self, request: web.BaseRequest) -> web.Response:
        """A real token through every worker."""
        return await self._fan_out("GET", "/health_generate", self._credentials.own())

    async def proxy(self, request: web.BaseRequest) -> web.Response:
        """The answer of a worker that speaks for all: the first one that is up, decode before prefill."""
        return await self._ask_one(request, "")

    async def list_models(self, request: web.BaseRequest) -> web.Response:
        """All models: of one worker if they all serve the same, else of one worker for each model, joined."""
        if not self._table.models.several:
            return await self._ask_one(request, "")
        headers = self._credentials.for_client(_authorization(request))
        speakers: dict[str, Worker] = {}
        for role in reversed(self._roles):
            for worker in self._table.alive(role):
                speakers.setdefault(next(iter(worker.models), ""), worker)
        answers = await asyncio.gather(*(self._call(w, "GET", request.path, headers) for w in speakers.values()))
        return json_response({"object": "list", "data": join_models(_decoded(answer.body) for answer in answers)})

    async def get_model(self, request: web.BaseRequest) -> web.Response:
        """One model, as a worker that serves it describes it."""
        return await self._ask_one(request, self._table.models.meant(unquote(request.path.removeprefix(_MODEL))))

    async def _ask_one(self, request: web.BaseRequest, model: str) -> web.Response:
        headers = self._credentials.for_client(_authorization(request))
        for role in reversed(self._roles):
            for worker in self._table.pool(role, model):
                answer = await self._call(worker, "GET", request.rel_url.raw_path, headers)
                if answer.status:
                    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        missing = missing_roles(self._table, self._roles, model) or list(self._roles)
        return error_response(503, no_worker_message(self._table, missing, model), code="no_worker")

    async def server_info(self, request: web.BaseRequest) -> web.Response:
        """The router's own settings and its workers with their load."""
        return json_response(
            {
                "router_manager": True,
                "pd_disaggregation": self._config.pd_disaggregation,
                "policy": self._config.policy,
                "service_discovery": None if self._discovery is None else self._discovery.status(),
                "workers": [describe(w) for w in self._table.workers()],
            }
        )

    async def list_workers(self, request: web.BaseRequest) -> web.Response:
        workers = [describe(w) for w in self._table.workers()]
        return json_response({"workers": workers, "total": len(workers)})

    async def add_worker(self, request: web.BaseRequest) -> web.Response:
        """{"url", "role": prefill|decode|unified, "bootstrap_port"}: it gets requests after its first good check."""
        asked = await _read_object(request)
        role = self._asked_role(asked)
        port = asked.get("bootstrap_port")
        if port is not None and not (isinstance(port, int) and 0 < port < 65536):
            return error_response(400, f"bootstrap_port: must be 1 to 65535, got {port!r}", field="bootstrap_port")
        if not isinstance(role, Role):
            return role
        url = _asked_url(asked)
        if isinstance(url, web.Response):
            return url
        worker = self._table.add(url, role=role, bootstrap_port=port, now_s=time.monotonic())
        self._monitor.watch(worker)
        await self._siblings.tell(request, asked)
        return json_response(describe(worker), status=201)

    async def remove_worker(self, request: web.BaseRequest) -> web.Response:
        """{"url"} (or ?url=): no new request goes there; those that run go on."""
        asked: dict[str, Any] = dict(request.query) or await _read_object(request)
        url = _asked_url(asked)
        if isinstance(url, web.Response):
            return url
        worker = self._table.remove(url)
        self._monitor.retire(worker)
        await self._siblings.tell(request, asked)
        return json_response(describe(worker))

    async def switch_role(self, request: web.BaseRequest) -> web.Response:
        """{"url", "role": prefill|decode, "force", "timeout"}: 200 once the worker serves in that role.

        409: it may not, or says that it cannot, and nothing has changed; 502: it did not come back in that role.
        """
        asked = await _read_object(request)
        role = self._asked_role(asked)
        if not isinstance(role, Role):
            return role
        url = _asked_url(asked)
        if isinstance(url, web.Response):
            return url
        force, drain_s = asked.get("force", False), asked.get("timeout")
        if force is not None and not isinstance(force, bool):
            return error_response(400, f"force: must be true or false, got {force!r}", field="force")
        if drain_s is not None and not (_is_number(drain_s) and drain_s >= 0):
            return error_response(400, f"timeout: must be seconds, at least 0, got {drain_s!r}", field="timeout")
        worker = self._table.find(url)
        if self._siblings.is_one(request):  # which moves it: see for ourselves
            self._monitor.look(worker)
            return json_response(describe(worker))
        headers = self._credentials.for_admin(_authorization(request))
        try:
            await self._switch.move(worker, role, force=bool(force), drain_s=drain_s, headers=headers)
        except SwitchRefused as err:
            return error_response(409, str(err), code="switch_refused")
        except SwitchFailed as err:
            return error_response(502, str(err), code="switch_failed")
        return json_response(describe(worker))

    async def get_loads(self, request: web.BaseRequest) -> web.Response:
        """What `least_load` compares, and what each worker last reported."""
        return json_response({"workers": [describe(w) for w in self._table.workers()]})

    async def flush_cache(self, request: web.BaseRequest) -> web.Response:
        return await self._fan_out("POST", "/flush_cache", self._credentials.for_admin(_authorization(request)))

    async def abort_request(self, request: web.BaseRequest) -> web.Response:
        """Passed to every worker: only they know request ids. All requests at once are an admin's to abort."""
        body = await request.read()
        headers = self._credentials.for_client(_authorization(request))
        if _aborts_all(body):
            if (refusal := key_refusal(request, self._gate, Access.ADMIN)) is not None:
                raise refusal
            headers = self._credentials.for_admin(_authorization(request))
        return await self._fan_out("POST", "/abort_request", headers, body)

    async def pass_to_all(self, request: web.BaseRequest) -> web.Response:
        """Pause, continue, weights, profiles: every worker does it, at the same time."""
        renames = request.path == "/update_weights_from_disk"  # models may have other names then
        timeout_s = UPDATE_TIMEOUT_S if renames else FAN_OUT_TIMEOUT_S
        headers = self._credentials.for_admin(_authorization(request))
        answer = await self._fan_out("POST", request.path, headers, await request.read(), timeout_s=timeout_s)
        if renames:
            self._monitor.refresh()
        return answer

    async def pass_adapter(self, request: web.BaseRequest) -> web.Response:
        """An adapter comes or goes at the workers of one model: of several, that which `model` names (unloaded: that has it)."""
        body = await request.read()
        asked = _decoded(body)
        fields = asked if isinstance(asked, dict) else {}
        try:
            name = self._table.models.of_adapter(
                model=fields.get("model"), adapter=fields.get("lora_name"), loads=request.path == LOAD_ADAPTER
            )
        except ValueError as err:
            return error_response(400, str(err), field="model")
        if "model" in fields:  # ours: a worker has one
            body = msgspec.json.encode({key: value for key, value in fields.items() if key != "model"})
        headers = self._credentials.for_admin(_authorization(request))
        answer = await self._fan_out("POST", request.path, headers, body, timeout_s=UPDATE_TIMEOUT_S, model=name)
        self._monitor.refresh()  # names have come or gone
        return answer

    async def get_metrics(self, request: web.BaseRequest) -> web.Response:
        """Of all processes of this router."""
        body = self._metrics.exposition()
        if not self._siblings.is_one(request) and (others := await self._siblings.expositions()):
            body = merge_expositions([body.decode(), *others]).encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def traces(self, request: web.BaseRequest) -> web.Response:
        """What this router, its siblings and its workers did for the requests asked for (service/telemetry/records.py)."""
        try:
            query = msgspec.json.decode(await request.read(), type=TracesQuery)
        except JSON_ERRORS as err:
            return error_response(400, f"the body is no query of traces: {err}")
        if (wrong := query_error(query)) is not None:
            return error_response(400, wrong, field=wrong.partition(":")[0])
        records = self._tracer.ring.find(query)
        if self._siblings.is_one(request):
            return json_response(Records(records=records))
        for body in await self._siblings.traces(query):
            records += msgspec.json.decode(body, type=Records).records
        ids = query.ids if query.ids is not None else last_ids(records, query.last or 0)
        of_workers = (
            await self._worker_records(ids, self._credentials.for_admin(_authorization(request))) if ids else []
        )
        wanted = frozenset(ids)
        kept = [record for record in records if record.request_id in wanted] + of_workers
        return json_response(Records(records=sorted(kept, key=lambda record: record.start_s)))

    async def _worker_records(self, ids: list[str], headers: dict[str, str]) -> list[Record]:
        """Of all workers that know this; others (of other makes, or dead) tell nothing."""
        body = msgspec.json.encode(TracesQuery(ids=ids))
        workers = self._table.workers()
        answers = await asyncio.gather(
            *(self._call(w, "POST", "/traces", headers, body, timeout_s=TRACES_TIMEOUT_S) for w in workers)
        )
        records: list[Record] = []
        for worker, answer in zip(workers, answers, strict=True):
            try:
                told = msgspec.json.decode(answer.body, type=Records).records if answer.status == 200 else []
            except JSON_ERRORS:
                continue
            records += [msgspec.structs.replace(record, url=worker.url) for record in told]
        return records

    async def openapi(self, request: web.BaseRequest) -> web.Response:
        """Own routes, and generation as the first worker that is up describes it (decode before prefill)."""
        for role in reversed(self._roles):
            for worker in self._table.alive(role):
                answer = await self._call(worker, "GET", "/openapi.json", self._credentials.own())
                if answer.status == 200:
                    return json_response(make_document(_decoded(answer.body)))
        return json_response(make_document(None))

    def _asked_role(self, asked: dict[str, Any]) -> Role | web.Response:
        word = asked.get("role", asked.get("worker_type", self._roles[0].value if len(self._roles) == 1 else None))
        word = _ROLE_WORDS.get(word, word) if isinstance(word, str) else word
        if word in [role.value for role in self._roles]:
            return Role(word)
        return error_response(400, f"role: must be one of {', '.join(self._roles)}, got {word!r}", field="role")

    async def _fan_out(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        timeout_s: float = FAN_OUT_TIMEOUT_S,
        model: str = "",
    ) -> web.Response:
        """Call every worker (that serves `model`) that is not down; the worst status of all, with each one's answer."""
        known = [w for w in self._table.workers() if not model or serves(w.models, model)]
        workers = [w for w in known if w.health in (Health.UP, Health.DRAINING)]
        if model and not workers:
            return error_response(503, no_worker_message(self._table, list(self._roles), model), code="no_worker")
        answers = await asyncio.gather(
            *(self._call(w, method, path, headers, body, timeout_s=timeout_s) for w in workers)
        )
        status = max((a.status or 502 for a in answers), default=503)
        results = [
            {"url": w.url, "role": w.role.value, "status": a.status, "answer": a.body.decode(errors="replace")}
            for w, a in zip(workers, answers, strict=True)
        ]
        return json_response({"success": status == 200, "workers": results}, status=status)

    async def _call(
        self,
        worker: Worker,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        timeout_s: float = FAN_OUT_TIMEOUT_S,
    ) -> "_Called":
        headers = headers | ({"Content-Type": "application/json"} if body else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, worker.url + path, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content_type = {"Content-Type": response.headers.get("Content-Type", "application/json")}
                return _Called(response.status, await response.read(), content_type)
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            return _Called(0, (str(err) or type(err).__name__).encode(), {})


class _Called(msgspec.Struct, frozen=True):
    """A worker's answer; status 0: none came, and `body` says why."""

    status: int
    body: bytes
    headers: dict[str, str]


def describe(worker: Worker) -> dict[str, Any]:
    """A worker for people and programs."""
    return {
        "id": worker.worker_id,
        "url": worker.url,
        "role": worker.role.value,
        "is_healthy": worker.answers,
        "health": worker.health.value,
        "silent": worker.silent,
        "busy_s": worker.busy_s,
        "leaving": worker.leaving,
        "switching_to": None if worker.switching_to is None else worker.switching_to.value,
        "circuit": worker.circuit.state.value,
        "models": worker.models,
        "discovered": worker.discovered,
        "last_error": worker.last_error,
        "bootstrap_host": worker.bootstrap_host if worker.role is Role.PREFILL else None,
        "bootstrap_port": worker.bootstrap_port,
        "load": worker.load_tokens,
        "inflight_requests": worker.inflight_requests,
        "inflight_tokens": worker.inflight_tokens,
        "assigned_total": worker.assigned_total,
        "report": None if worker.report is None else asdict(worker.report),
    }


def _authorization(request: web.BaseRequest) -> str:
    return request.headers.get("Authorization", "")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except JSON_ERRORS:
        return None


def _aborts_all(body: bytes) -> bool:
    """Whether a worker could read it so; what is no JSON object is for the workers to refuse."""
    asked = _decoded(body)
    return isinstance(asked, dict) and bool(asked.get("abort_all"))


def _asked_url(asked: dict[str, Any]) -> str | web.Response:
    url = asked.get("url")
    try:
        check_worker_url("url", url if isinstance(url, str) else "")
    except ConfigError as err:
        return error_response(400, str(err), field="url")
    return str(url)


async def _read_object(request: web.BaseRequest) -> dict[str, Any]:
    """The body as a JSON object; 400 else."""
    try:
        return msgspec.json.decode(await request.read(), type=dict[str, Any])
    except JSON_ERRORS as err:
        raise ApiError(400, f"the body is not a JSON object: {err}") from None
