"""Routes of liveness, readiness, metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from router.fleet import SUMMED_GAUGES, PeerProcesses
from router.history.metrics import RouterMetrics
from router.http.openapi import SERVER
from router.http.worker_calls import WorkerCalls
from router.pool.worker import Worker
from router.pool.workers import WorkerTable, missing_roles
from router.requests.answer import no_worker
from router.requests.dispatch import LiveRequests
from service.flags import installed_version
from service.http.api import ApiRouter
from service.http.errors import DRAINING, ApiError
from service.http.request import HttpRequest
from service.http.routes import get, json_response, post
from service.telemetry.expositions import merge_expositions

PROBES = ("/liveness", "/health", "/readiness", "/ping")


def notes_of(table: WorkerTable, live: LiveRequests) -> dict[str, Any]:
    """Return what delays requests although the router is ready."""
    workers, misfits = table.workers(), table.misfits
    paused = [w.url for w in workers if w.process.paused]
    incompatible = [w.url for w in workers if w.worker_id in misfits]
    return {
        **({"blocked": True, "num_blocked_reqs": live.num_blocked} if live.blocked else {}),
        **({"paused": paused} if paused else {}),
        **({"incompatible": incompatible} if incompatible else {}),
    }


@dataclass(eq=False)
class HealthApi:
    calls: WorkerCalls
    live: LiveRequests
    metrics: RouterMetrics
    peers: PeerProcesses

    def api(self) -> ApiRouter:
        liveness, *readiness = PROBES
        routes = [
            get(liveness, self.liveness),
            *(get(path, self.readiness) for path in readiness),
            post("/ping", self.readiness),  # SageMaker's
            get("/version", self.version),
            get("/metrics", self.get_metrics, plain_text=True),
        ]
        return ApiRouter(SERVER, routes)

    async def liveness(self, request: HttpRequest) -> Response:
        """Report that this process answers."""
        return json_response({"status": "alive"})

    async def version(self, request: HttpRequest) -> Response:
        """Return the version."""
        return json_response({"version": installed_version()})

    async def readiness(self, request: HttpRequest) -> Response:
        """Report whether requests would be served.

        200 if all roles have workers that fit; with `?workers=all` if all are healthy in all
        processes.
        """
        if self.live.draining:
            status = {"status": DRAINING, "num_live_reqs": len(self.live)}
            return json_response(status, status=503, headers={"Retry-After": "1"})
        table = self.calls.table
        workers, missing = table.workers(), missing_roles(table, self.calls.ways)
        if missing:
            raise no_worker(table, missing)
        if request.query.get("workers") == "all" and (waits_for := await self._waits_for(request, workers)):
            raise ApiError(503, waits_for, code="not_all_healthy")
        healthy = sum(w.answers for w in workers)
        status = {"status": "ready", "healthy_workers": healthy, "total_workers": len(workers)}
        return json_response({**status, **notes_of(table, self.live)})

    async def _waits_for(self, request: HttpRequest, workers: Sequence[Worker]) -> str:
        misfits = self.calls.table.misfits
        late = [f"{w.role} {w.url} is {w.health}" for w in workers if not w.answers]
        late += [f"{w.role} {w.url}: {misfits[w.worker_id]}" for w in workers if w.worker_id in misfits]
        if late:
            return f"{len(late)} of {len(workers)} workers are not healthy: {', '.join(late)}"
        if self.peers.is_peer(request):
            return ""
        num_late = self.peers.num - len(await self.peers.request("GET", "/readiness?workers=all"))
        return f"{num_late} other processes of this router do not know every worker as healthy yet" if num_late else ""

    async def get_metrics(self, request: HttpRequest) -> Response:
        """Return Prometheus metrics of all processes of the router."""
        body = await self.metrics.scrape()
        if not self.peers.is_peer(request) and (others := await self.peers.request("GET", "/metrics")):
            body = merge_expositions([body, *others], summed=SUMMED_GAUGES)
        return Response(content=body, headers={"Content-Type": "text/plain; version=0.0.4"})
