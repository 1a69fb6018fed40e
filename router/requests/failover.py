"""A stream whose worker is lost goes on at others, behind the tokens that its client has (service/http/resume.py).

Bounds: `most` workers may be lost under one stream. So a request that ends its workers is refused in time.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import msgspec

from router.attempts.pair_attempt import AttemptGroup, AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed
from router.body import write_body
from router.requests.picking import Picker
from service.http.resume import FRAMES_HEADER, RESUME_FIELD, RESUME_HEADER, FrameRecord, sign


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

    def open(self, request: RequestContext) -> "ResumableStream":
        return ResumableStream(self, request)


@dataclass(eq=False)
class ResumableStream:
    """One client's stream. `attempt`: where it goes on; None: at its first workers. `close` ends it."""

    failover: Failover
    request: RequestContext
    record: FrameRecord = field(default_factory=FrameRecord)
    attempt: PairAttempt | None = None
    _lost: int = 0

    def failure(self, attempt: PairAttempt) -> CallFailed | None:
        """Return why a stream that came to its end in order is not whole."""
        if not self.record.failed:
            return None
        body = self.record.last_event.partition(b"data: ")[2].strip()
        return CallFailed(attempt.answering.worker, reason="status", status=self.record.failed, body=body)

    async def go_on(self, lost: PairAttempt, failure: CallFailed) -> PairAttempt | None:
        """Place the rest of the answer; None: it cannot go on, or no worker takes it."""
        request, launcher = self.request, self.failover.launcher
        self._lost += 1
        resume = self.record.resume() if failure.retryable and self._lost <= self.failover.most else None
        if resume is None:
            return None
        request.note_failed(failure, lost.workers)
        self._ask_for_rest(resume)
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
            if request.failed is not None and not request.failed.last.retryable:
                return None
        return None

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.end()
            self.attempt = None

    def _ask_for_rest(self, resume: bytes) -> None:
        request = self.request
        fields = {**request.parsed.fields, RESUME_FIELD: msgspec.Raw(resume)}
        request.parsed = msgspec.structs.replace(request.parsed, fields=fields, wants_input_logprobs=False)
        request.body = write_body(request.parsed)
        request.headers = {**request.headers, RESUME_HEADER: sign(self.failover.launcher.secret, resume)}

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
