"""Stored responses (/v1/responses) of all processes of a router.

A process stores those it answered, and copies of those fetched from peers.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import ClassVar

import msgspec
from fastapi import Response
from prometheus_client.core import GaugeMetricFamily, Metric

from router.attempts.request import RequestContext
from router.body import FIRST_RESPONSE_FIELD, HISTORY_FIELD, ParsedBody, with_fields, write_body
from router.body import Api as Generation
from router.config import RouterConfig
from router.fleet import PeerProcesses
from router.pool.worker import Worker
from service.http.api import ApiRouter
from service.http.errors import bad_field, decode_body, decode_or_none
from service.http.request import HttpRequest
from service.http.routes import Tag, delete, get, json_response, no_such_path, post
from service.responses import api
from service.responses.api import PATH, StoredHandler, caller_of, named_response
from service.responses.items import REFERENCE, Conversation, StoreFields, not_found, open_conversation, to_store
from service.responses.store import MAX_BYTES, LocalBook, ResponseStore, StoredResponse
from service.waiter import BODIES

PEER_PATH = "/peers/responses"  # route for peers
MAX_RESPONSES = 100_000  # per conversation

_BEGINS = b"event: response.created\n"
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n")
_DATA = b"data: "

Abort = Callable[[Mapping[str, str], str], Awaitable[object]]


class PeerQuestion(msgspec.Struct, kw_only=True):
    """`act`: find, remove or cancel."""

    act: str
    id: str
    owner: str


@dataclass(eq=False)
class SharedBook:
    """A `ResponseBook`. `abort(headers, id)` aborts a request sent with these headers."""

    local: LocalBook
    peers: PeerProcesses
    abort: Abort

    async def find(self, id: str, owner: str) -> list[StoredResponse]:
        found: list[StoredResponse] = []
        while id and len(found) < MAX_RESPONSES:
            part = await self.local.find(id, owner) or await self._find_at_peers(id, owner)
            if not part:
                break
            found += part
            id = part[-1].previous
        return found

    async def remove(self, id: str, owner: str) -> bool:
        at_peers = await self._ask("remove", id, owner)
        return await self.local.remove(id, owner) or b"true" in at_peers

    async def cancel(self, id: str, owner: str) -> bool:
        return await self.local.cancel(id, owner) or b"true" in await self._ask("cancel", id, owner)

    async def _find_at_peers(self, id: str, owner: str) -> list[StoredResponse]:
        answers = [msgspec.json.decode(a, type=list[StoredResponse]) for a in await self._ask("find", id, owner)]
        found = max(answers, key=len, default=[])
        for stored in reversed(found):
            self.local.store.put(stored)
        return found

    async def _ask(self, act: str, id: str, owner: str) -> list[bytes]:
        return await self.peers.request("POST", PEER_PATH, PeerQuestion(act=act, id=id, owner=owner))


@dataclass(eq=False, kw_only=True)
class Responses:
    """A `BodyPart`. Without `book` none is stored."""

    book: SharedBook | None
    apis: ClassVar = (Generation.RESPONSES,)
    needles: ClassVar = ()

    async def prepare(self, request: RequestContext) -> ParsedBody:
        """Raises ApiError(400)."""
        await self._open(request)
        return request.parsed

    async def _open(self, request: RequestContext) -> None:
        fields = StoreFields(
            input=request.parsed.fields.get("input", msgspec.Raw(b"")),
            previous_response_id=_value(request, "previous_response_id"),
            store=_value(request, "store"),
        )
        if self.book is None:
            return await _store_nothing(request, fields)
        is_kept, has_reference = fields.store is not False, REFERENCE in bytes(fields.input)
        if not is_kept and not has_reference and fields.previous_response_id is None:
            return None
        owner = caller_of(request.http)
        conversation = await open_conversation(fields, partial(self.book.find, owner=owner))
        changes = {HISTORY_FIELD: conversation.history, **({"input": conversation.input} if has_reference else {})}
        changes |= {FIRST_RESPONSE_FIELD: msgspec.json.encode(conversation.first)} if conversation.first else {}
        await _change(request, changes)
        if is_kept:
            keeper = ResponseKeeper(self.book, conversation, owner=owner, request=request)
            request.answer_parts = (*request.answer_parts, keeper)
        return None


async def _store_nothing(request: RequestContext, fields: StoreFields) -> None:
    if fields.previous_response_id is not None:
        why = "--max-stored-responses is 0"
        raise bad_field("previous_response_id", f"no responses are stored here ({why}); send the conversation as input")
    if fields.store is not False:
        await _change(request, {"store": b"false"})


async def _change(request: RequestContext, changes: Mapping[str, bytes]) -> None:
    def changed() -> tuple[ParsedBody, bytes]:
        parsed = with_fields(request.parsed, changes)
        return parsed, write_body(parsed)

    request.parsed, request.body = await BODIES.run(changed, size=len(request.body) + sum(map(len, changes.values())))


def _value(request: RequestContext, name: str) -> object:
    raw = request.parsed.fields.get(name)
    return None if raw is None else decode_or_none(raw)


class _Response(msgspec.Struct):
    response: msgspec.Raw


class _Begun(msgspec.Struct):
    id: str


class ResponseKeeper:
    """An `AnswerPart`, which stores an answer before its client has all of it."""

    def __init__(self, book: SharedBook, conversation: Conversation, *, owner: str, request: RequestContext) -> None:
        self._book, self._owner, self._request = book, owner, request
        self._conversation = conversation.to_keep()
        self._running = ExitStack()
        self._has_started = False

    def on_answer(self, body: bytes) -> bytes:
        stored = to_store(self._conversation, owner=self._owner, answer=body)
        if stored is not None:
            self._book.local.store.put(stored)
        return body

    def on_events(self, events: bytes) -> bytes:
        if not self._has_started:
            self._has_started = True
            self._begin(response_in(events, events.find(_BEGINS)))
        last = events.rfind(b"\n\n", 0, -2) + 2 if events.count(b"\n\n") > 1 else 0
        if events.startswith(_ENDS, last):
            self.on_answer(response_in(events, last))
        return events

    def close(self) -> None:
        self._running.close()

    def _begin(self, response: bytes) -> None:
        begun: _Begun | None = decode_or_none(response, _Begun)
        if begun is not None:
            self._running.enter_context(self._book.local.running(begun.id, self._owner, abort=self._abort))

    async def _abort(self, id: str) -> None:
        await self._book.abort(self._request.headers, id)


def response_in(events: bytes, at: int) -> bytes:
    start = events.find(_DATA, max(0, at)) + len(_DATA)
    event: _Response | None = decode_or_none(events[start : events.find(b"\n", start)], _Response)
    return b"" if event is None else bytes(event.response)


def store_of(config: RouterConfig) -> ResponseStore | None:
    if config.max_stored_responses == 0:
        return None
    max_count = -(-config.max_stored_responses // config.workers)
    return ResponseStore(max_count=max_count, max_bytes=MAX_BYTES // config.workers)


def of_store(store: ResponseStore, workers: Sequence[Worker]) -> Iterator[Metric]:
    yield GaugeMetricFamily("tandem_router_stored_responses", "Stored answers of /v1/responses", value=len(store))
    text = "Bytes of stored answers of /v1/responses, with their inputs"
    yield GaugeMetricFamily("tandem_router_stored_response_bytes", text, value=store.num_bytes)


# ---- Routes of stored responses, for clients and peers.


STORED = Tag("Responses", "Answers of /v1/responses that the router remembers.")


@dataclass(eq=False)
class ResponsesApi:
    book: SharedBook | None
    peers: PeerProcesses

    def api(self) -> ApiRouter:
        one = PATH + "/{id}"
        routes = [
            get(one, self._of(api.get_response)),
            delete(one, self._of(api.delete_response)),
            post(f"{one}/cancel", self._of(api.cancel_response)),
            get(f"{one}/input_items", self._of(api.list_input_items)),
            post(PEER_PATH, self.answer_peer, is_alias=True),
        ]
        return ApiRouter(STORED, routes)

    async def answer_peer(self, request: HttpRequest) -> Response:
        if self.book is None or not self.peers.is_peer(request):
            raise no_such_path(request)
        question = decode_body(await request.read(), PeerQuestion)
        acts = {"find": self.book.local.find, "remove": self.book.local.remove, "cancel": self.book.local.cancel}
        return json_response(await acts[question.act](question.id, question.owner))

    def _of(self, handler: StoredHandler) -> Callable[[HttpRequest], Awaitable[Response]]:
        @wraps(handler)
        async def handle(request: HttpRequest) -> Response:
            if self.book is None:
                raise not_found(named_response(request))
            return await handler(request, self.book)

        return handle
