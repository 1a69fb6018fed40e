"""Routes about the router's state: liveness, readiness, metrics, traces."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from router.client.session import call_worker
from router.fleet.peer_processes import PeerProcesses, merge_expositions
from router.http.worker_calls import WorkerCalls
from router.metrics import RouterMetrics
from router.pool.worker import Worker
from router.pool.workers import missing_roles
from router.requests.live import LiveRequests
from router.requests.replies import no_worker
from service.http.errors import DRAINING, ApiError, bad_field, decode_body
from service.http.json_depth import decode_or_none
from service.http.stream import json_response
from service.security.keys import authorization_of
from service.telemetry.records import Record, Records, TracesQuery, last_ids, query_error
from service.telemetry.tracer import Tracer

PROBES = ("/liveness", "/health", "/readiness")
TRACES_TIMEOUT_S = 10.0


@dataclass(eq=False)
class HealthApi:
    calls: WorkerCalls
    live: LiveRequests
    metrics: RouterMetrics
    tracer: Tracer
    peers: PeerProcesses

    def routes(self) -> list[web.RouteDef]:
        liveness, *readiness = PROBES
        return [
            web.get(liveness, self.liveness),
            *(web.get(path, self.readiness) for path in readiness),
            web.get("/metrics", self.get_metrics),
            web.post("/traces", self.traces),
        ]

    async def liveness(self, request: web.BaseRequest) -> web.Response:
        return json_response({"status": "alive"})

    async def readiness(self, request: web.BaseRequest) -> web.Response:
        """200 if a request would find its workers; with `?workers=all` only once every worker is healthy, in every process."""
        if self.live.draining:
            status = {"status": DRAINING, "num_live_reqs": len(self.live)}
            return json_response(status, status=503, headers={"Retry-After": "1"})
        table = self.calls.table
        workers, missing = table.workers(), missing_roles(table, self.calls.roles)
        if missing:
            raise no_worker(table, missing)
        if request.rel_url.query.get("workers") == "all" and (waits_for := await self._waits_for(request, workers)):
            raise ApiError(503, waits_for, code="not_all_healthy")
        healthy = sum(w.answers for w in workers)
        return json_response({"status": "ready", "healthy_workers": healthy, "total_workers": len(workers)})

    async def _waits_for(self, request: web.BaseRequest, workers: Sequence[Worker]) -> str:
        """What keeps `?workers=all` waiting; "": nothing. A peer process gets the answer of this process alone."""
        late = [f"{w.role} {w.url} is {w.health}" for w in workers if not w.answers]
        if late:
            return f"{len(late)} of {len(workers)} workers are not healthy: {', '.join(late)}"
        if self.peers.is_peer(request):
            return ""
        num_late = self.peers.num - len(await self.peers.request("GET", "/readiness?workers=all"))
        return f"{num_late} other processes of this router do not know every worker as healthy yet" if num_late else ""

    async def get_metrics(self, request: web.BaseRequest) -> web.Response:
        body = self.metrics.exposition()
        if not self.peers.is_peer(request) and (others := await self.peers.request("GET", "/metrics")):
            body = merge_expositions([body, *others])
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def traces(self, request: web.BaseRequest) -> web.Response:
        query = decode_body(await request.read(), TracesQuery)
        if (wrong := query_error(query)) is not None:
            field, _, message = wrong.partition(": ")
            raise bad_field(field, message)
        records = self.tracer.ring.find(query)
        if self.peers.is_peer(request):
            return json_response(Records(records=records))
        for body in await self.peers.request("POST", "/traces", query):
            records += msgspec.json.decode(body, type=Records).records
        ids = query.ids if query.ids is not None else last_ids(records, query.last or 0)
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        of_workers = await self._worker_records(ids, headers) if ids else []
        wanted = frozenset(ids)
        kept = [record for record in records if record.request_id in wanted] + of_workers
        return json_response(Records(records=sorted(kept, key=lambda record: record.start_s)))

    async def _worker_records(self, ids: list[str], headers: Mapping[str, str]) -> list[Record]:
        """Records of the workers that have /traces; others (of other makes, or dead) have none."""
        body, workers = msgspec.json.encode(TracesQuery(ids=ids)), self.calls.table.workers()
        session = self.calls.session
        calls = (
            call_worker(session, "POST", f"{w.url}/traces", headers, body, timeout_s=TRACES_TIMEOUT_S) for w in workers
        )
        records: list[Record] = []
        for worker, answer in zip(workers, await asyncio.gather(*calls), strict=True):
            found: Records | None = decode_or_none(answer.body, Records) if answer.status == 200 else None
            if found is not None:
                records += [msgspec.structs.replace(record, url=worker.url) for record in found.records]
        return records
