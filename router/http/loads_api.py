"""GET /v1/loads and /get_load: all workers as the DP ranks of one SGLang server."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from router.http.worker_calls import WorkerCalls
from router.pool.reports import count_of
from service.http.json_depth import object_of
from service.http.loads import loads_answer
from service.http.stream import json_response
from service.security.keys import authorization_of

LOADS = ("/v1/loads", "/loads")  # SMG tries the second first


@dataclass(eq=False)
class LoadsApi:
    calls: WorkerCalls

    def routes(self) -> list[web.RouteDef]:
        return [*(web.get(path, self.loads) for path in LOADS), web.get("/get_load", self.old_load)]

    async def loads(self, request: web.BaseRequest) -> web.Response:
        rows = await self._rows(request)
        return json_response(loads_answer(rows))

    async def old_load(self, request: web.BaseRequest) -> web.Response:
        return json_response([old_row(row) for row in await self._rows(request)])

    async def _rows(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        headers = self.calls.credentials.for_client(authorization_of(request.headers))
        answers = await self.calls.answers("GET", "/v1/loads", headers)
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
