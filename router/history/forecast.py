"""Predicts TTFT and ITL of a worker from measurements of this router process. Pure.

    TTFT of a prefill (or unified) worker    a + b * (tokens queued there + the request's own)
    ITL of a decode (or unified) worker      a + b * requests there

Fitted by recursive least squares with exponential forgetting (West 1979, "Updating mean and
variance estimates").
"""

from dataclasses import dataclass, field

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.pool.worker import Pool, Role, Worker

MIN_EVENTS = 4  # shorter streams teach no ITL
KEEP = 0.98  # weight of a point relative to the next one: about 50 of them count
ANSWER_SHARE = 0.02  # weight of a new answer in the mean length
MIN_POINTS = 8  # fewer give no prediction
STALE_S = 30.0  # a worker without a measurement for so long is tried once despite its forecast


@dataclass(slots=True)
class LineFit:
    """`news_s`: time of the last measurement, or attempt at one."""

    news_s: float = 0.0
    num_points: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float, now_s: float) -> None:
        self.news_s = now_s
        self.num_points += 1
        self._weight = self._weight * KEEP + 1.0
        dx, dy, share = x - self._x, y - self._y, 1.0 / self._weight
        self._x += share * dx
        self._y += share * dy
        self._xx = KEEP * self._xx + dx * (x - self._x)
        self._xy = KEEP * self._xy + dx * (y - self._y)

    @property
    def slope(self) -> float:
        return max(0.0, self._xy / self._xx) if self._xx > 1e-9 else 0.0

    @property
    def intercept(self) -> float:
        return max(0.0, self._y - self.slope * self._x)

    @property
    def is_known(self) -> bool:
        return self.num_points >= MIN_POINTS

    def at(self, x: float) -> float | None:
        return self.intercept + self.slope * x if self.is_known else None


@dataclass(slots=True, eq=False)
class _Known:
    """Measurements of one incarnation. `pending_tokens`: of prompts not yet computed."""

    ttft: LineFit = field(default_factory=LineFit)
    itl: LineFit = field(default_factory=LineFit)
    pending_tokens: int = 0


class SentPrompt(msgspec.Struct):
    """A request at one worker. `ahead_tokens` are computed before its first token."""

    known: _Known  # the incarnation that it was sent to
    tokens: int
    ahead_tokens: int
    sent_s: float
    waiting: bool = True


class ObservedStream(msgspec.Struct):
    """A streaming attempt, without its first chunk, whose events have unknown times."""

    prompt: SentPrompt
    answering: _Known
    first_s: float = 0.0
    last_s: float = 0.0
    num_events: int = 0
    requests: int = 0  # at the answering worker when the stream began


class Forecast:
    """Fitted lines by worker. `answer_events`: mean per stream."""

    def __init__(self) -> None:
        self.answer_events = 0.0
        self._known: dict[int, _Known] = {}  # by worker id
        self._streams: dict[PairAttempt, ObservedStream] = {}

    def forget(self, worker: Worker) -> None:
        self._known.pop(worker.worker_id, None)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        first = attempt.placements[0]
        tokens = request.hints.prompt_tokens - first.cached_tokens
        prompt = self.expect(first.worker, tokens, now_s=now_s)
        self._streams[attempt] = ObservedStream(prompt, self._of(attempt.answering.worker))

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        if attempt.answering.streaming:  # a whole answer does not show its first token
            stream = self._streams[attempt]
            self.learn_ttft(stream.prompt, now_s=now_s)
            stream.first_s = stream.last_s = now_s
            stream.requests = attempt.answering.worker.requests_everywhere

    def on_chunk(self, request: RequestContext, attempt: PairAttempt, chunk: bytes, now_s: float) -> None:
        stream = self._streams[attempt]
        stream.num_events += chunk.count(b"\n\n")
        stream.last_s = now_s

    def on_attempt_ended(self, attempt: PairAttempt, now_s: float) -> None:
        stream = self._streams.pop(attempt)
        self.computed(stream.prompt)
        if attempt.completed and stream.num_events:
            requests = (stream.requests + attempt.answering.worker.requests_everywhere) / 2
            lasted_s = stream.last_s - stream.first_s
            self._learn_answer(stream.answering, stream.num_events, lasted_s, requests, now_s)

    def expect(self, worker: Worker, tokens: int, *, now_s: float) -> SentPrompt:
        """After the request's charge; `tokens` are uncached."""
        known = self._of(worker)
        own = 0 if worker.role is Role.PREFILL else tokens  # a prefill worker's load includes them already
        prompt = SentPrompt(known, tokens, self.waiting_tokens(worker) + own, now_s)
        known.pending_tokens += tokens
        return prompt

    def learn_ttft(self, prompt: SentPrompt, *, now_s: float) -> None:
        prompt.known.ttft.add(prompt.ahead_tokens, now_s - prompt.sent_s, now_s)
        self.computed(prompt)

    def learn_answer(self, worker: Worker, num_events: int, lasted_s: float, *, requests: float, now_s: float) -> None:
        """`requests`: the mean number at the worker."""
        self._learn_answer(self._of(worker), num_events, lasted_s, requests, now_s)

    def _learn_answer(self, known: _Known, num_events: int, lasted_s: float, requests: float, now_s: float) -> None:
        share = ANSWER_SHARE if self.answer_events else 1.0
        self.answer_events += share * (num_events - self.answer_events)
        if num_events >= MIN_EVENTS:
            known.itl.add(requests, lasted_s / num_events, now_s)

    def computed(self, prompt: SentPrompt) -> None:
        """Idempotent."""
        if prompt.waiting:
            prompt.waiting = False
            prompt.known.pending_tokens -= prompt.tokens

    def ttft_s(self, worker: Worker, tokens: int) -> float | None:
        return self._of(worker).ttft.at(self.waiting_tokens(worker) + tokens)

    def itl_s(self, worker: Worker) -> float | None:
        return self._of(worker).itl.at(worker.requests_everywhere + 1)

    def fits(self, worker: Worker) -> tuple[LineFit, LineFit]:
        known = self._of(worker)
        return known.ttft, known.itl

    def waiting_tokens(self, worker: Worker) -> int:
        """Queued tokens; for unified workers, whose load is KV, only of this process."""
        return worker.load_tokens if worker.role is Role.PREFILL else self._of(worker).pending_tokens

    def first_known(self, pool: Pool, which: int) -> LineFit | None:
        for worker in pool:
            known = self._known.get(worker.worker_id)
            if known is not None and (line := (known.ttft, known.itl)[which]).is_known:
                return line
        return None

    def note_try(self, fit: LineFit, now_s: float) -> None:
        fit.news_s = max(fit.news_s, now_s)

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.worker_id)
        if known is None:
            known = self._known[worker.worker_id] = _Known()
        return known
