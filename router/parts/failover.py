"""Failover: a lost or migrating worker's answer continues at another (service/http/resume.py).

    lost                       a pair: prefill computes prompt and tokens again
    migrated, its KV waits     another decode worker, which gets the KV; if that fails, a pair

A request ends after `most` dead workers or `retry_max` errors, as it may be the cause.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
from fastapi import Response

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import MOVED, CallFailed, UpstreamCall, broken_stream
from router.client.credentials import Credentials
from router.client.session import call_worker
from router.client.upstream import UpstreamError, nothing
from router.pool.active_calls import ActiveCall
from router.pool.worker import Role, Worker
from router.requests.answer import ClientAnswer, StreamSplitter, ask_for_rest, failure_response
from router.requests.merge import Merger
from router.requests.picking import Picker
from service.http.errors import decode_or_none
from service.http.guard import owner_said
from service.http.request import StreamedResponse
from service.http.resume import MOVE_OUT, RESUME_FIELD, RESUME_HEADER, FrameRecord, Resume, known_frames, sign
from service.telemetry.context import about
from service.waiter import end_tasks

NO_MEMBER = 403  # status of a worker without this secret
TAKE_OVER_S = 10.0  # for the first token of another decode worker; then a pair may be faster


log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Failover:
    """Needs the launcher's `secret`."""

    most: int
    retry_max: int
    picker: Picker

    def open(
        self, launcher: AttemptLauncher, request: RequestContext, attempt: PairAttempt, mergers: Sequence[Merger]
    ) -> "ResumableAnswer":
        answer = ResumableAnswer(launcher, request, attempt, mergers, failover=self, end_attempt=attempt.end)
        if RESUME_HEADER in request.headers:  # its client reconnected
            answer.record.take_head(known_frames(msgspec.json.decode(request.parsed.fields[RESUME_FIELD], type=Resume)))
        return answer


@dataclass(eq=False, kw_only=True)
class ResumableAnswer(ClientAnswer):
    """An answer that continues at other workers. `end_attempt` ends the current attempt, `prefill`
    is the last pair's worker.
    """

    failover: Failover
    end_attempt: Callable[[], None]
    record: FrameRecord = field(default_factory=FrameRecord)
    prefill: Worker | None = None
    _rooms: Sequence[int] = ()  # of the current migration
    _all_rooms: list[int] = field(default_factory=list)

    async def whole(self) -> Response:
        """A whole answer. If it cannot continue elsewhere it restarts (CallFailed)."""
        if not self.attempt.answering.framed:
            return await super().whole()
        try:
            self._follow()
            body = await _read_whole(self.attempt.answering, self.record)
            while isinstance(body, CallFailed):
                goes_on = await self._goes_on(body)
                failure = self.attempt.refused or body
                if not goes_on and failure.retryable and not self.record.can_resume():
                    raise failure
                if not goes_on:
                    return failure_response(failure, self.request.path)
                body = await _read_whole(self.attempt.answering, self.record)
            return self._respond(body)
        finally:
            self._close()

    def _splitter(self, record: FrameRecord | None = None) -> StreamSplitter:
        return super()._splitter(self.record)

    def _follow(self) -> None:
        super()._follow()
        answering = self.attempt.answering
        answering.goes_on = self.record.can_resume
        if self.attempt.prefill is not None:
            self.prefill = self.attempt.prefill.worker
        if self.prefill is not None:
            answering.rooms_to_leave = self._rooms_to_leave
            answering.names_owner = owner_said(self.request.headers)

    def _rooms_to_leave(self) -> Mapping[str, int]:
        left, count = self.record.samples_left(), self.request.parsed.num_samples
        rooms = self.launcher.rooms
        if not left or max(left) >= count or not rooms.has_room_for(count):
            return {}
        self._rooms = rooms.mint(count)
        self._all_rooms += self._rooms
        return {name: self._rooms[index] for index, name in left.items()}

    def _incomplete(self) -> CallFailed | None:
        worker = self.attempt.answering.worker
        if self.record.moved:
            return _has_moved(worker)
        if not self.record.failed:
            return None
        event = self.record.last_event
        body = (event.partition(b"data: ")[2] or event).strip()  # a line of a line stream has no prefix
        return CallFailed(worker, reason="status", status=self.record.failed, body=body)

    async def _goes_on(self, failure: CallFailed) -> bool:
        launcher, lost = self.launcher, self.attempt
        if lost.refused is not None:  # reported before; decode's stream was cut for it
            failure = lost.refused
        elif failure.reason != MOVED:
            launcher.on_call_failed(failure)
        rest = await self._begin_rest(failure)
        for notify in launcher.events.on_failover:
            notify(failure, rest)
        if rest is None:
            return False
        _log_failover(self.request, failure, rest, num_tokens=self.record.num_tokens())
        rest.begin_answer()
        self.attempt = rest
        self._follow()
        if rest.prefill is not None:
            for merger in self.mergers:
                merger.follow(rest.prefill.reply.take())
        return True

    async def _end(self, out: StreamedResponse, failure: CallFailed | None, last_event: bytes = b"") -> Response:
        return await super()._end(out, failure, self.record.last_event if self.record.failed else b"")

    async def _begin_rest(self, failure: CallFailed) -> PairAttempt | None:
        self.request.note_failed(failure, self.attempt.workers)
        if self.launcher.secret is None or not self._may_go_on(failure) or not self.record.can_resume():
            return None
        found = await self._by_kv() or await self._by_pair()
        if found is not None:
            self.record.restart()
        return found

    async def _by_kv(self) -> PairAttempt | None:
        rooms, self._rooms = self._rooms, ()
        if not self.record.has_sources() or self.prefill is None or not rooms:
            return None
        placement = self.failover.picker.pick_for_rest(self.request, but=self.attempt.answering.worker)
        if placement is None:
            return None
        self._ask_for_rest(by_kv=True)
        self._leave_attempt()
        first = self.launcher.begin_rest(self.request, placement, prefill=self.prefill, rooms=rooms)
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                return await self._begun(first)
        except TimeoutError:
            return None

    async def _by_pair(self) -> PairAttempt | None:
        request, launcher = self.request, self.launcher
        self._ask_for_rest(by_kv=False)
        self._leave_attempt()
        for number in range(self.failover.retry_max + 1):
            placements = self.failover.picker.pick(request) or await self.failover.picker.pick_later(request)
            if placements is None or request.fails_by_itself(placements):
                return None
            attempt = launcher.begin(request, placements)
            if number == self.failover.retry_max:
                attempt.stay()
            begun = await self._begun(attempt)
            if begun is not None:
                return begun
            if request.failed is not None and not self._may_go_on(request.failed.last):
                return None
        return None

    def _may_go_on(self, failure: CallFailed) -> bool:
        failed, limits = self.request.failed, self.failover
        has_erred = failed is not None and failed.num_errors > limits.retry_max
        is_to_blame = self.request.is_to_blame(limits.most)
        return (failure.retryable or failure.status == NO_MEMBER) and not has_erred and not is_to_blame

    def _close(self) -> None:
        self.attempt.answering.rooms_to_leave = dict  # which held the answer
        self._leave_attempt()
        self.launcher.rooms.release(self._all_rooms)

    def _leave_attempt(self) -> None:
        end, self.end_attempt = self.end_attempt, nothing
        end()

    def _ask_for_rest(self, *, by_kv: bool) -> None:
        resume, secret = self.record.resume(by_kv=by_kv), self.launcher.secret
        assert resume is not None and secret is not None, "can_resume: frames were asked for"
        ask_for_rest(self.request, resume, secret)

    async def _begun(self, first: PairAttempt) -> PairAttempt | None:
        try:
            await self.launcher.until_started(self.request, first)
        except CallFailed:
            first.end()
            return None
        except asyncio.CancelledError:
            first.end()
            raise
        self.end_attempt = first.end
        return first


def _log_failover(request: RequestContext, failure: CallFailed, rest: PairAttempt, *, num_tokens: int) -> None:
    moved, lost, to = failure.reason == MOVED, failure.worker.url, rest.answering.worker.url
    log.log(
        logging.INFO if moved else logging.WARNING,
        "failover of request %s from %s to %s, %d token%s kept%s: %s",
        request.request_id,
        lost,
        to,
        num_tokens,
        "" if num_tokens == 1 else "s",
        "" if rest.prefill else " with their KV",
        "it was moved" if moved else failure.detail,
        extra=about(request_id=request.request_id, from_worker=lost, to_worker=to, num_tokens=num_tokens),
    )


def _has_moved(worker: Worker) -> CallFailed:
    return CallFailed(worker, reason=MOVED, detail="the answer has left it, and no other worker took it over")


async def _read_whole(call: UpstreamCall, record: FrameRecord) -> bytes | CallFailed:
    """`record` takes frames before it."""
    if not call.framed:
        return call.reply.take()
    data = b""
    try:
        while chunk := await call.reply.readany():
            data += chunk
            if data.startswith(b":"):
                data = record.take_head(data)
    except UpstreamError as err:
        return broken_stream(call.worker, err)
    if record.moved:
        return _has_moved(call.worker)
    if record.failed:
        headers = {"content-type": "application/json"}
        if record.retry_after_s:
            headers["retry-after"] = str(record.retry_after_s)
        return CallFailed(call.worker, reason="status", status=record.failed, headers=headers, body=data)
    return data if data else CallFailed(call.worker, reason="lost", detail="the answer ended before its body")


# ---- migration

ANSWER_S = 5.0  # generation continues meanwhile
END_S = 5.0  # a step in flight, and buffered bytes of a slow client


class _Answer(msgspec.Struct):
    moving: list[str]


@dataclass(eq=False)
class MoveOrders:
    r"""Orders to decode workers to let streams go, with their KV.

    call.leave() --rooms--> POST /move_out --> the stream ends with the KV's address --> failover
        \___ other engine, no answer, no end in time ___/--> give_up: prefill recomputes it
    """

    session: aiohttp.ClientSession
    credentials: Credentials
    secret: bytes
    _orders: set[asyncio.Task[None]] = field(default_factory=set)

    def let_go(self, worker: Worker, calls: Sequence[ActiveCall], why: str) -> None:
        leaving = defaultdict[str, dict[ActiveCall, Mapping[str, int]]](dict)  # by the owner of their names
        for call in calls:
            if worker.role is Role.DECODE and (rooms := call.leave()):
                leaving[call.names_owner][call] = rooms
            else:
                worker.calls.pop(call, None)
                call.give_up(why)
        for owner, of_owner in leaving.items():
            order = self._order(worker, of_owner, why, owner=owner)
            task = asyncio.create_task(order, name=f"moves from {worker.url}")
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    async def close(self) -> None:
        await end_tasks(self._orders)

    async def _order(
        self, worker: Worker, leaving: Mapping[ActiveCall, Mapping[str, int]], why: str, *, owner: str
    ) -> None:
        samples = [{"rid": rid, "room": room} for rooms in leaving.values() for rid, room in rooms.items()]
        body = msgspec.json.encode({"samples": samples, "owner": owner})
        headers = {**self.credentials.own(), RESUME_HEADER: sign(self.secret, body)}
        answer = await call_worker(self.session, "POST", f"{worker.url}{MOVE_OUT}", headers, body, timeout_s=ANSWER_S)
        found: _Answer | None = decode_or_none(answer.body, _Answer) if answer.status == 200 else None
        moving = frozenset() if found is None else frozenset(found.moving)
        if not moving:
            text = "decode worker %s hands over no KV (status %d): prefill workers compute it again"
            log.info(text, worker.url, answer.status)
        for call, rooms in leaving.items():
            if moving.isdisjoint(rooms):
                _give_up(worker, call, why)
        await asyncio.sleep(END_S)
        for call in leaving:
            _give_up(worker, call, why)


def _give_up(worker: Worker, call: ActiveCall, why: str) -> None:
    if call in worker.calls:
        del worker.calls[call]
        call.give_up(why)
