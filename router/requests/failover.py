"""An answer whose worker is lost goes on at others, behind the tokens that its client, or the router, has (service/http/resume.py).

Bounds: `most` workers may die under one request. So one that ends its workers is refused in time.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import msgspec

from router.attempts.pair_attempt import AttemptGroup, AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed
from router.body import write_body
from router.requests.merge import Merger
from router.requests.picking import Picker
from service.http.resume import FRAMES_HEADER, RESUME_FIELD, RESUME_HEADER, FrameRecord, Resume, known_frames, sign


@dataclass(eq=False, kw_only=True)
class Failover:
    """`retry_max`: attempts to place the rest, beside the first."""

    most: int
    retry_max: int
    picker: Picker
    launcher: AttemptLauncher

    def headers(self) -> dict[str, str]:
        """What asks a worker for frames."""
        return {FRAMES_HEADER: "1"}

    def open(self, request: RequestContext) -> "ResumableAnswer":
        answer = ResumableAnswer(self, request)
        if RESUME_HEADER in request.headers:  # its client came again
            answer.record.take_head(known_frames(msgspec.json.decode(request.parsed.fields[RESUME_FIELD], type=Resume)))
        return answer


@dataclass(eq=False)
class ResumableAnswer:
    """One client's answer. `attempt`: where it goes on; None: at its first workers. `close` ends it."""

    failover: Failover
    request: RequestContext
    record: FrameRecord = field(default_factory=FrameRecord)
    attempt: PairAttempt | None = None

    def follow(self, attempt: PairAttempt) -> None:
        """From now on the answer is that of `attempt`."""
        attempt.answering.goes_on = self.record.can_resume
        attempt.watch_prefill(self.failover.launcher.on_call_failed)

    def failure(self, attempt: PairAttempt) -> CallFailed | None:
        """Return why a stream that came to its end in order is not whole."""
        if not self.record.failed:
            return None
        body = self.record.last_event.partition(b"data: ")[2].strip()
        return CallFailed(attempt.answering.worker, reason="status", status=self.record.failed, body=body)

    async def take_over(self, lost: PairAttempt, failure: CallFailed, merger: Merger | None) -> PairAttempt | None:
        """Place the rest of the answer, and tell all; None: it cannot go on, or no worker takes it."""
        launcher = self.failover.launcher
        launcher.on_call_failed(failure)
        rest = None if lost.refused else await self._go_on(lost, failure)
        for notify in launcher.events.on_failover:
            notify(failure, rest is not None)
        if rest is not None:
            rest.begin_answer()
            self.follow(rest)
            if merger is not None and rest.prefill is not None:
                merger.follow(rest.prefill.reply.take())
        return rest

    async def _go_on(self, lost: PairAttempt, failure: CallFailed) -> PairAttempt | None:
        request, launcher = self.request, self.failover.launcher
        request.note_failed(failure, lost.workers)
        resume = self.record.resume() if self._may_go_on(failure) else None
        if resume is None:
            return None
        ask_for_rest(request, resume, launcher.secret)
        self.close()
        for _ in range(self.failover.retry_max + 1):
            placements = self.failover.picker.pick(request) or await self.failover.picker.pick_later(request)
            if placements is None:
                return None
            first = launcher.begin(request, request.headers_at(launcher.clock()), placements)
            self.attempt = await self._begun(first)
            if self.attempt is not None:
                self.record.failed = 0
                return self.attempt
            if request.failed is not None and not self._may_go_on(request.failed.last):
                return None
        return None

    def _may_go_on(self, failure: CallFailed) -> bool:
        return failure.retryable and not self.request.ends_workers(self.failover.most)

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.end()
            self.attempt = None

    async def _begun(self, first: PairAttempt) -> PairAttempt | None:
        """Wait for the answer of an attempt; None: none came."""
        group = AttemptGroup(first, partial(self.failover.launcher.on_attempt_failed, self.request))
        try:
            return await group.winner()
        except CallFailed:
            group.end()
            return None
        except asyncio.CancelledError:
            group.end()
            raise


def ask_for_rest(request: RequestContext, resume: bytes, secret: bytes | None) -> None:
    """Have the next attempts go on behind what the client has."""
    fields = {**request.parsed.fields, RESUME_FIELD: msgspec.Raw(resume)}
    request.parsed = msgspec.structs.replace(request.parsed, fields=fields)
    request.body = write_body(request.parsed)
    request.headers = {**request.headers, RESUME_HEADER: sign(secret, resume)}
