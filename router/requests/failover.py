"""Failover: a lost or migrating worker's answer continues at another (service/http/resume.py).

    lost                       a pair: prefill computes prompt and tokens again
    migrated, its KV waits     another decode worker, which gets the KV; if that fails, a pair

A request ends after `most` dead workers or `retry_max` errors, as it may be the cause.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import MOVED, CallFailed
from router.body import write_body
from router.pool.worker import Worker
from router.requests.merge import Merger
from router.requests.picking import Picker
from router.requests.relay import has_moved
from service.http.guard import owner_said
from service.http.resume import FRAMES_HEADER, RESUME_FIELD, RESUME_HEADER, FrameRecord, Resume, known_frames, sign

NO_MEMBER = 403  # status of a worker without this secret
TAKE_OVER_S = 10.0  # for the first token of another decode worker; then a pair may be faster


@dataclass(eq=False, kw_only=True)
class Failover:
    """Failover, with `retry_max` retries; needs the launcher's `secret`."""

    most: int
    retry_max: int
    picker: Picker
    launcher: AttemptLauncher

    def headers(self) -> dict[str, str]:
        return {} if self.launcher.secret is None else {FRAMES_HEADER: "1"}

    def open(self, request: RequestContext, end_first: Callable[[], None]) -> "ResumableAnswer":
        """Record an answer. `end_first` ends the first attempt on a take-over."""
        answer = ResumableAnswer(self, request, end_first)
        if RESUME_HEADER in request.headers:  # its client reconnected
            answer.record.take_head(known_frames(msgspec.json.decode(request.parsed.fields[RESUME_FIELD], type=Resume)))
        return answer


@dataclass(eq=False)
class ResumableAnswer:
    """An answer. `end_attempt` ends the current attempt, `prefill` is the last pair's worker."""

    failover: Failover
    request: RequestContext
    end_attempt: Callable[[], None]
    record: FrameRecord = field(default_factory=FrameRecord)
    prefill: Worker | None = None
    _rooms: Sequence[int] = ()  # of the current migration
    _all_rooms: list[int] = field(default_factory=list)

    def follow(self, attempt: PairAttempt) -> None:
        answering = attempt.answering
        answering.goes_on = self.record.can_resume
        if attempt.prefill is not None:
            self.prefill = attempt.prefill.worker
        if self.prefill is not None:
            answering.rooms_to_leave = self._rooms_to_leave
            answering.names_owner = owner_said(self.request.headers)
        attempt.watch_prefill(self.failover.launcher.on_call_failed)

    def _rooms_to_leave(self) -> Mapping[str, int]:
        """Mint a room per sample; return those of live samples by rid."""
        left, count = self.record.samples_left(), self.request.parsed.num_samples
        rooms = self.failover.launcher.rooms
        if not left or max(left) >= count or not rooms.has_room_for(count):
            return {}
        self._rooms = rooms.mint(count)
        self._all_rooms += self._rooms
        return {name: self._rooms[index] for index, name in left.items()}

    def failure(self, attempt: PairAttempt) -> CallFailed | None:
        """Return why an orderly end is incomplete."""
        worker = attempt.answering.worker
        if self.record.moved:
            return has_moved(worker)
        if not self.record.failed:
            return None
        event = self.record.last_event
        body = (event.partition(b"data: ")[2] or event).strip()  # a line of a line stream has no prefix
        return CallFailed(worker, reason="status", status=self.record.failed, body=body)

    async def take_over(self, lost: PairAttempt, failure: CallFailed, merger: Merger | None) -> PairAttempt | None:
        """Continue at other workers, if possible, and notify observers."""
        launcher = self.failover.launcher
        if lost.refused is not None:  # reported before; decode's stream was cut for it
            failure = lost.refused
        elif failure.reason != MOVED:
            launcher.on_call_failed(failure)
        rest = await self._go_on(lost, failure)
        for notify in launcher.events.on_failover:
            notify(failure, rest)
        if rest is not None:
            rest.begin_answer()
            self.follow(rest)
            if merger is not None and rest.prefill is not None:
                merger.follow(rest.prefill.reply.take())
        return rest

    async def _go_on(self, lost: PairAttempt, failure: CallFailed) -> PairAttempt | None:
        self.request.note_failed(failure, lost.workers)
        if self.failover.launcher.secret is None or not self._may_go_on(failure) or not self.record.can_resume():
            return None
        found = await self._by_kv(lost) or await self._by_pair()
        if found is not None:
            self.record.restart()
        return found

    async def _by_kv(self, lost: PairAttempt) -> PairAttempt | None:
        """Continue at a decode worker that fetches the waiting KV."""
        rooms, self._rooms = self._rooms, ()
        if not self.record.has_sources() or self.prefill is None or not rooms:
            return None
        placement = self.failover.picker.pick_for_rest(self.request, but=lost.answering.worker)
        if placement is None:
            return None
        self._ask_for_rest(by_kv=True)
        self._leave_attempt()
        first = self.failover.launcher.begin_rest(self.request, placement, prefill=self.prefill, rooms=rooms)
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                return await self._begun(first)
        except TimeoutError:
            return None

    async def _by_pair(self) -> PairAttempt | None:
        request, launcher = self.request, self.failover.launcher
        self._ask_for_rest(by_kv=False)
        self._leave_attempt()
        for number in range(self.failover.retry_max + 1):
            placements = self.failover.picker.pick(request) or await self.failover.picker.pick_later(request)
            if placements is None or request.fails_by_itself(placements):
                return None
            attempt = launcher.begin(request, request.headers_at(launcher.clock()), placements)
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
        is_to_blame = self.request.ends_workers(limits.most) or self.request.fails_by_itself()
        return (failure.retryable or failure.status == NO_MEMBER) and not has_erred and not is_to_blame

    def close(self) -> None:
        self._leave_attempt()
        self.failover.launcher.rooms.release(self._all_rooms)

    def _leave_attempt(self) -> None:
        end, self.end_attempt = self.end_attempt, _nothing
        end()

    def _ask_for_rest(self, *, by_kv: bool) -> None:
        resume, secret = self.record.resume(by_kv=by_kv), self.failover.launcher.secret
        assert resume is not None and secret is not None, "can_resume: frames were asked for"
        ask_for_rest(self.request, resume, secret)

    async def _begun(self, first: PairAttempt) -> PairAttempt | None:
        try:
            await self.failover.launcher.until_started(self.request, first)
        except CallFailed:
            first.end()
            return None
        except asyncio.CancelledError:
            first.end()
            raise
        self.end_attempt = first.end
        return first


def ask_for_rest(request: RequestContext, resume: bytes, secret: bytes) -> None:
    fields = {**request.parsed.fields, RESUME_FIELD: msgspec.Raw(resume)}
    request.parsed = msgspec.structs.replace(request.parsed, fields=fields)
    request.body = write_body(request.parsed)
    request.headers = {**request.headers, RESUME_HEADER: sign(secret, resume)}


def _nothing() -> None:
    """Do nothing."""
