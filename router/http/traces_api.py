"""Routes of request times: of many for an admin, of one for its client."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Response

from router.client.session import call_worker
from router.fleet import PeerProcesses
from router.history.recorder import MAX_ID_CHARS, DashboardRequest, DashboardSnapshot
from router.http.openapi import SERVER
from router.http.worker_calls import WorkerCalls
from router.pool.worker import Worker
from service.http.api import ApiRouter
from service.http.errors import ApiError, decode_or_none
from service.http.guard import CALLER
from service.http.request import HttpRequest
from service.http.routes import TracesBody, get, json_response, post, read_query
from service.security.keys import Access, Caller, authorization_of
from service.telemetry.context import Record, Records, Tracer, TracesQuery, last_ids

TRACES = "/traces"
ROOM_ATTRIBUTE = "tandem.bootstrap_room"
TIMEOUT_S = 10.0


@dataclass(eq=False, kw_only=True)
class TracesApi:
    calls: WorkerCalls
    tracer: Tracer
    peers: PeerProcesses
    memory: Callable[[], Awaitable[DashboardSnapshot]]

    def api(self) -> ApiRouter:
        return ApiRouter(SERVER, [post(TRACES, self.traces, body=TracesBody), get(TRACES + "/{id}", self.trace)])

    async def traces(self, request: HttpRequest) -> Response:
        """Return recent requests with their times in router and workers."""
        query = read_query(await request.read())
        records = self.tracer.ring.find(query)
        if self.peers.is_peer(request):
            return json_response(Records(records=records))
        for body in await self.peers.request("POST", TRACES, query):
            records += msgspec.json.decode(body, type=Records).records
        ids = query.ids if query.ids is not None else last_ids(records, query.last or 0)
        headers = self.calls.credentials.for_admin(authorization_of(request.headers))
        of_workers = await self._worker_records(self.calls.table.workers(), ids, headers) if ids else []
        wanted = frozenset(ids)
        kept = [record for record in records if record.request_id in wanted] + of_workers
        return json_response(Records(records=sorted(kept, key=lambda record: record.start_s)))

    async def trace(self, request: HttpRequest) -> Response:
        """Return a request with its workers' records, to its own client or an admin."""
        request_id, caller = request.path.removeprefix(TRACES + "/"), request[CALLER]
        record = last_of((await self.memory()).records, request_id, caller)
        if record is None:
            raise ApiError(404, f"no request {request_id} of this key is remembered", code="not_found")
        urls = {url for attempt in record.attempts for url in (attempt.prefill, attempt.answering)}
        workers = [worker for worker in self.calls.table.workers() if worker.url in urls]
        parts = await self._worker_records(workers, [request_id], self.calls.credentials.own_admin())
        shown = [part for part in parts if may_see(part, record, caller)]
        status = {"now_s": time.monotonic(), "wall_s": time.time(), "record": record, "workers": shown}
        return json_response(status, headers={"Cache-Control": "no-store"})

    async def _worker_records(
        self, workers: Sequence[Worker], ids: Sequence[str], headers: Mapping[str, str]
    ) -> list[Record]:
        body, session = msgspec.json.encode(TracesQuery(ids=list(ids))), self.calls.session
        calls = (call_worker(session, "POST", w.url + TRACES, headers, body, timeout_s=TIMEOUT_S) for w in workers)
        records: list[Record] = []
        for worker, answer in zip(workers, await asyncio.gather(*calls), strict=True):
            found: Records | None = decode_or_none(answer.body, Records) if answer.status == 200 else None
            if found is not None:
                records += [msgspec.structs.replace(record, url=worker.url) for record in found.records]
        return records


def may_see(part: Record, record: DashboardRequest, caller: Caller) -> bool:
    """Return whether a worker's record belongs to `record`, as ids may repeat."""
    room = part.attributes.get(ROOM_ATTRIBUTE)
    return str(room) in map(str, record.rooms) if room is not None else caller.access >= Access.ADMIN


def last_of(records: Collection[DashboardRequest], request_id: str, caller: Caller) -> DashboardRequest | None:
    may_see_all = caller.access >= Access.ADMIN
    kept_id = request_id[:MAX_ID_CHARS]
    found = [r for r in records if r.request_id == kept_id and (may_see_all or r.caller == caller.name)]
    return found[-1] if found else None
