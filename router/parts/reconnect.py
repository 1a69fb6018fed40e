"""Reconnection of clients: a repeated request gets the events after its last one.

All workers are queried (service/http/reconnect.py).
"""

import asyncio
import hashlib
from dataclasses import dataclass
from functools import partial

import aiohttp
import msgspec
from fastapi import Response

from router.attempts.request import RequestContext, Serve
from router.body import OLLAMA
from router.client.credentials import Credentials
from router.client.session import WorkerAnswer, call_worker
from router.pool.breaker import Health
from router.pool.worker import Worker
from router.pool.workers import WorkerTable
from router.requests.answer import ask_for_rest
from service.http.errors import ApiError
from service.http.reconnect import KEEP_HEADER, LAST_EVENT_HEADER, RETAINED_PATH, Keep, RetainedQuestion, RetainedRest
from service.http.resume import RESUME_HEADER, sign
from service.security.keys import authorization_of, owner_of
from service.waiter import BODIES

ASK_TIMEOUT_S = 2.0  # a frozen worker must not delay the others
AGAIN_S = 1  # Retry-After while a worker has not answered
NOT_KNOWN = f"{LAST_EVENT_HEADER}: a worker that may keep the stream does not answer now; send the same request again"

_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, kw_only=True)
class Reconnect:
    """A `ServePart`. `window_s`: --resume-window."""

    window_s: float
    table: WorkerTable
    session: aiohttp.ClientSession
    credentials: Credentials
    secret: bytes

    async def around(self, request: RequestContext, serve: Serve) -> Response:
        """Make workers retain a stream, or serve only the rest after the last event.

        ApiError: 410 lost, 503 uncertain.
        """
        if request.parsed.streams and request.parsed.api not in OLLAMA:
            sent = await request.http.read()  # before any change
            body = await BODIES.run(partial(digest_of, request.path, sent), size=len(sent))
            keep = _encode(Keep(window_s=self.window_s, owner=_owner(request), body=body))
            request.headers = {**request.headers, KEEP_HEADER: f"{sign(self.secret, keep)} {keep.decode()}"}
            if after := request.http.headers.get(LAST_EVENT_HEADER, ""):
                rest = await self._find(request, body, after)
                request.events_first = rest.events
                ask_for_rest(request, rest.resume, self.secret)
        return await serve(request)

    async def _find(self, request: RequestContext, body: str, after: str) -> RetainedRest:
        owner, request_id = _owner(request), request.request_id
        question = _encode(RetainedQuestion(request_id=request_id, owner=owner, body=body, after=after))
        roles = {way[-1] for way in request.ways}
        live = [w for w in self.table.workers() if w.health is not Health.DOWN]
        workers = [w for w in live if w.role in roles or (w.serves_whole and w.role in self.table.whole_at)]
        asked = [asyncio.ensure_future(self._ask(worker, request, question)) for worker in workers]
        all_know = True
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found.status == 200:
                    return msgspec.json.decode(found.body, type=RetainedRest)
                all_know = all_know and (found.refused or 0 < found.status < 500)  # it has answered, or is gone
        finally:
            for task in asked:
                task.cancel()
        if all_know:
            raise ApiError(410, self._gone(request), code="stream_gone")
        raise ApiError(503, NOT_KNOWN, code="stream_unknown", retry_after_s=AGAIN_S)

    async def _ask(self, worker: Worker, request: RequestContext, question: bytes) -> WorkerAnswer:
        headers = self.credentials.for_client(authorization_of(request.http.headers))
        headers = {**headers, RESUME_HEADER: sign(self.secret, question)}
        url = worker.url + RETAINED_PATH
        return await call_worker(self.session, "POST", url, headers, question, timeout_s=ASK_TIMEOUT_S)

    def _gone(self, request: RequestContext) -> str:
        return (
            f"{LAST_EVENT_HEADER}: the stream {request.request_id} cannot go on: no worker keeps it for this API key, path and body. "
            f"A stream is kept for {self.window_s:g} s after its connection broke (--resume-window), by the worker that wrote it; "
            "send the request without this header to begin again"
        )


def digest_of(path: str, body: bytes) -> str:
    return hashlib.blake2b(path.encode() + b"\n" + body, digest_size=16).hexdigest()


def _owner(request: RequestContext) -> str:
    return owner_of(authorization_of(request.http.headers))
