"""Messages of the main frontend to the others (engine/frontend/other)."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine.frontend.client.scheduler_link import concerns_requests
from engine.messages import ControlReply, ToFrontend
from service.http.errors import ApiError
from service.http.listening import UnixPeers
from service.http.reconnect import RETAINED_PATH, RetainedQuestion
from service.telemetry.context import Record, Records, TracesQuery, last_ids
from service.waiter import end_tasks

READY, METRICS, TRACES = "/ready", "/metrics", "/traces"
ABORT, MOVE, REPLY, CLOSE = "/abort", "/move", "/reply", "/close"
READY_POLL_S = 0.02
CHANGE_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0  # a frozen process must not delay the worker's end


class AbortName(msgspec.Struct, frozen=True):
    """Any owner if `owner` is None."""

    name: str
    owner: str | None


class MoveName(msgspec.Struct, frozen=True):
    name: str
    room: int
    owner: str


class Moved(msgspec.Struct, frozen=True):
    was_here: bool


class RankReply(msgspec.Struct, frozen=True):
    rank: int
    reply: ControlReply


class CloseFrontend(msgspec.Struct, frozen=True, kw_only=True):
    """Reject new requests with this error; `fails_live`: fail running ones, too."""

    status: int
    message: str
    code: str | None
    retry_after_s: int | None
    fails_live: bool


class OtherFrontends:
    """`lost`: why a frontend cannot serve."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.lost: str | None = None
        self._peers = UnixPeers(paths, headers={})
        self._one_change = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def num(self) -> int:
        return self._peers.num

    async def until_ready(self) -> None:
        """A dead one ends the worker."""
        while len(await self._peers.request("GET", READY)) < self._peers.num:
            await asyncio.sleep(READY_POLL_S)

    def informed(self, handle: Callable[[ToFrontend], None], rank: int) -> Callable[[ToFrontend], None]:
        """Wrap `handle`: other frontends get changes of adapters or weights first."""
        if not self._peers.num:
            return handle

        def on_message(message: ToFrontend) -> None:
            if isinstance(message, ControlReply) and concerns_requests(message):
                task = asyncio.create_task(self._inform(RankReply(rank, message), handle))
                self._changes.add(task)
                task.add_done_callback(self._changes.discard)
            else:
                handle(message)

        return on_message

    async def kept(self, question: RetainedQuestion) -> list[bytes]:
        return await self._peers.request("POST", RETAINED_PATH, question)

    async def abort(self, name: str, *, owner: str | None) -> None:
        await self._peers.request("POST", ABORT, AbortName(name, owner))

    async def move_out(self, name: str, room: int, *, owner: str) -> bool:
        answers = await self._peers.request("POST", MOVE, MoveName(name, room, owner))
        return any(msgspec.json.decode(body, type=Moved).was_here for body in answers)

    async def close_to_requests(self, error: ApiError, *, fails_live: bool) -> None:
        body = CloseFrontend(
            status=error.status,
            message=error.message,
            code=error.code,
            retry_after_s=error.retry_after_s,
            fails_live=fails_live,
        )
        await self._peers.request("POST", CLOSE, body, timeout_s=CLOSE_TIMEOUT_S)

    async def expositions(self) -> list[bytes]:
        return await self._peers.request("GET", METRICS)

    async def with_records(self, mine: list[Record], query: TracesQuery) -> list[Record]:
        answers = await self._peers.request("POST", TRACES, query)
        found = mine + [record for body in answers for record in msgspec.json.decode(body, type=Records).records]
        if query.last is None:
            return found
        ids = frozenset(last_ids(found, query.last))
        return [record for record in found if record.request_id in ids]

    async def close(self) -> None:
        await end_tasks(self._changes)
        await self._peers.close()

    async def _inform(self, change: RankReply, handle: Callable[[ToFrontend], None]) -> None:
        async with self._one_change:
            answers = await self._peers.request("POST", REPLY, change, timeout_s=CHANGE_TIMEOUT_S)
            if len(answers) < self._peers.num:
                self.lost = f"a frontend process did not take a change of adapters or weights in {CHANGE_TIMEOUT_S:g} s"
            handle(change.reply)


NO_OTHERS = OtherFrontends(())  # of a worker with one frontend
