"""Predicts TTFT and ITL of a worker from measurements of this router process. Pure.

    TTFT of a computing worker      a + b * (tokens queued there + the request's own)
    ITL of an answering worker      a + b * answers there
    step of an answering worker     the same, less the time of prompts computed meanwhile

Fitted by recursive least squares with exponential forgetting (West 1979, "Updating mean and
variance estimates").
"""

import math
from dataclasses import dataclass, field
from functools import partial

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.choice.where import Figures, FittedLine
from router.pool.worker import LoadReport, Role, Worker

MIN_EVENTS = 4  # shorter streams teach no ITL
KEEP = 0.98  # weight of a point relative to the next one: about 50 of them count
ANSWER_SHARE = 0.02  # weight of a new answer in the mean length
MIN_POINTS = 8  # fewer give no prediction
STALE_S = 30.0  # a worker without a measurement for so long is tried once despite its forecast
DEFAULT_TTFT, DEFAULT_STEP = FittedLine(0.0, 1e-4), FittedLine(0.02, 0.0005)  # before measurements
NO_LINE = FittedLine(0.0, 0.0)
DEFAULT_ANSWER = 128.0  # tokens
ZERO_WEIGHT = 0.02
KEEP_ALIKE = 0.995  # as KEEP, of lines of a role
MAX_SCALE = 8.0  # times slower or faster than its role
MAX_PAUSED = 0.97  # highest share of an answer's time that prompts take
_WITH_MEMORY = ("prealloc", "transfer", "retracted")  # further stages whose KV is in reports


@dataclass(slots=True)
class LineFit:
    """`news_s`: time of the last measurement, or attempt at one. `zero_weight`: of a point at the
    origin, which decides if all x are equal.
    """

    zero_weight: float = 0.0
    keep: float = KEEP
    news_s: float = 0.0
    num_tries: int = 0
    num_points: int = 0
    _weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    _yy: float = 0.0

    def add(self, x: float, y: float, now_s: float) -> None:
        self.news_s = now_s
        self.num_points += 1
        self._weight = self._weight * self.keep + 1.0
        dx, dy, share = x - self.mean_x, y - self.mean_y, 1.0 / self._weight
        self.mean_x += share * dx
        self.mean_y += share * dy
        self.xx = self.keep * self.xx + dx * (x - self.mean_x)
        self.xy = self.keep * self.xy + dx * (y - self.mean_y)
        self._yy = self.keep * self._yy + dy * (y - self.mean_y)

    @property
    def slope(self) -> float:
        return max(0.0, self.xy / self.xx) if self.xx > 1e-9 else 0.0

    @property
    def intercept(self) -> float:
        return max(0.0, self.mean_y - self.slope * self.mean_x)

    @property
    def spread(self) -> float:
        """The standard deviation of measurements around the line."""
        return math.sqrt(max(0.0, self._yy - self.slope * self.xy) / self._weight) if self._weight else 0.0

    @property
    def line(self) -> FittedLine:
        """For prices, with the point at the origin."""
        of_zero = self.zero_weight * self.mean_x
        xx = self.xx + of_zero * self.mean_x
        slope = max(0.0, (self.xy + of_zero * self.mean_y) / xx) if xx > 1e-9 else 0.0
        return self.line_of(slope)

    def line_of(self, slope: float) -> FittedLine:
        return FittedLine(max(0.0, self.mean_y - slope * self.mean_x), slope, self.spread)

    @property
    def is_known(self) -> bool:
        return self.num_points >= MIN_POINTS

    def at(self, x: float) -> float | None:
        return self.intercept + self.slope * x if self.is_known else None


@dataclass(slots=True, eq=False)
class _Known:
    """Measurements of one incarnation. `ttft`: of pairs for prefill workers, which have `whole` for
    whole requests. `pending_tokens`: of prompts not yet computed. `prompts_s`: what computed ones
    took. `alike`: of its role and model; None for these, and for a former incarnation.
    """

    alike: "_Known | None" = None
    ttft: LineFit = field(default_factory=partial(LineFit, ZERO_WEIGHT))
    whole: LineFit = field(default_factory=partial(LineFit, ZERO_WEIGHT))
    itl: LineFit = field(default_factory=LineFit)
    step: LineFit = field(default_factory=LineFit)
    pending_tokens: int = 0
    prompts_s: float = 0.0

    @property
    def paused(self) -> float:
        """Share of an answer's time that prompts take."""
        if not self.itl.mean_y:
            return 0.0
        return min(MAX_PAUSED, max(0.0, 1 - self.step.mean_y / self.itl.mean_y))


class SentPrompt(msgspec.Struct):
    """A request at one worker. `ahead_tokens` are computed before its first token."""

    known: _Known  # the incarnation that it was sent to
    line: str  # of it, which the request teaches; empty: none
    tokens: int
    ahead_tokens: int
    sent_s: float
    waiting: bool = True


class RunningAnswer(msgspec.Struct):
    """An answer since its first token."""

    known: _Known
    worker: Worker
    first_s: float
    requests: int  # at the worker when it began
    prompts_s: float  # of the worker when it began


class ObservedStream(msgspec.Struct):
    """A streaming attempt, without its first chunk, whose events have unknown times."""

    prompt: SentPrompt
    answer: RunningAnswer | None = None
    last_s: float = 0.0
    num_events: int = 0


class Forecast:
    """Fitted lines by worker, and by role and model. `answer_events`: mean per stream."""

    def __init__(self) -> None:
        self.answer_events = 0.0
        self._known: dict[int, _Known] = {}  # by worker id
        self._alike: dict[tuple[Role, tuple[str, ...]], _Known] = {}
        self._streams: dict[PairAttempt, ObservedStream] = {}

    def forget(self, worker: Worker) -> None:
        known = self._known.pop(worker.worker_id, None)
        if known is not None:
            known.alike = None

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        first = attempt.placements[0]
        tokens = 0 if attempt.by_kv else request.hints.prompt_tokens - first.known_tokens
        fetch_s = 0.0 if first.source is None else first.source.seconds  # no part of the line
        prompt = self.expect(first.worker, tokens, now_s=now_s + fetch_s, whole=attempt.prefill is None)
        prompt.line = "" if attempt.by_kv else prompt.line
        self._streams[attempt] = ObservedStream(prompt)

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        if attempt.answering.streaming:  # a whole answer does not show its first token
            stream = self._streams[attempt]
            self.learn_ttft(stream.prompt, now_s=now_s)
            stream.answer, stream.last_s = self.begin_answer(attempt.answering.worker, now_s=now_s), now_s

    def on_chunk(self, request: RequestContext, attempt: PairAttempt, chunk: bytes, now_s: float) -> None:
        stream = self._streams[attempt]
        stream.num_events += chunk.count(b"\n\n")
        stream.last_s = now_s

    def on_attempt_ended(self, attempt: PairAttempt, now_s: float) -> None:
        stream = self._streams.pop(attempt)
        self.computed(stream.prompt)
        if stream.answer is not None and attempt.completed and stream.num_events:
            self.learn_answer(stream.answer, stream.num_events, last_s=stream.last_s, now_s=now_s)

    def num_events(self, attempt: PairAttempt) -> int:
        """Events of its stream so far."""
        return self._streams[attempt].num_events

    def answer_tokens(self, most: int) -> float:
        """The expected length of an answer of at most `most` tokens."""
        return min(self.answer_events or DEFAULT_ANSWER, most)

    def expect(self, worker: Worker, tokens: int, *, now_s: float, whole: bool = False) -> SentPrompt:
        """After the request's charge; `tokens` are uncached. `whole`: it answers there, too."""
        known = self._of(worker)
        line = "whole" if whole and worker.role is Role.PREFILL else "ttft"
        own = 0 if worker.role is Role.PREFILL else tokens  # a prefill worker's load includes them already
        prompt = SentPrompt(known, line, tokens, self.waiting_tokens(worker) + own, now_s)
        known.pending_tokens += tokens
        return prompt

    def learn_ttft(self, prompt: SentPrompt, *, now_s: float) -> None:
        for known in (prompt.known, prompt.known.alike) if prompt.line else ():
            if known is not None:
                getattr(known, prompt.line).add(prompt.ahead_tokens, now_s - prompt.sent_s, now_s)
        self.computed(prompt)

    def begin_answer(self, worker: Worker, *, now_s: float) -> RunningAnswer:
        """After the first token."""
        known = self._of(worker)
        return RunningAnswer(known, worker, now_s, worker.num_answers, known.prompts_s)

    def learn_answer(self, answer: RunningAnswer, num_events: int, *, last_s: float, now_s: float) -> None:
        """`num_events`: after the first. `last_s`: time of the last one."""
        known = answer.known
        share = ANSWER_SHARE if self.answer_events else 1.0
        self.answer_events += share * (num_events - self.answer_events)
        if num_events >= MIN_EVENTS:
            requests, lasted_s = (answer.requests + answer.worker.num_answers) / 2, last_s - answer.first_s
            steps_s = lasted_s - min(MAX_PAUSED * lasted_s, known.prompts_s - answer.prompts_s)
            for one in (known, known.alike):
                if one is not None:
                    one.itl.add(requests, lasted_s / num_events, now_s)
                    one.step.add(requests, steps_s / num_events, now_s)

    def computed(self, prompt: SentPrompt) -> None:
        """Idempotent."""
        if prompt.waiting:
            prompt.waiting, known = False, prompt.known
            known.pending_tokens -= prompt.tokens
            alike = known.alike or known
            line = alike.whole if alike.whole.is_known else alike.ttft
            known.prompts_s += prompt.tokens * line.slope if line.is_known else 0.0

    def fits(self, worker: Worker) -> tuple[LineFit, LineFit]:
        known = self._of(worker)
        return known.ttft, known.itl

    def line(self, worker: Worker, *, whole: bool) -> LineFit:
        """TTFT of whole requests there, or of pairs."""
        known = self._of(worker)
        return known.whole if whole and worker.role is Role.PREFILL else known.ttft

    def answer_line(self, worker: Worker, *, whole: bool) -> LineFit:
        """Return the ITL line; a pair's has no prompts, as routes can keep them away."""
        known = self._of(worker)
        return known.step if worker.role is Role.DECODE and not whole else known.itl

    def waiting_tokens(self, worker: Worker) -> int:
        """Queued tokens; for workers whose load is KV, only of this process."""
        return worker.tokens_everywhere if worker.role is Role.PREFILL else self._of(worker).pending_tokens

    def figures(self, worker: Worker) -> Figures:
        """By its role's lines, scaled; what is unknown is as of any."""
        known, report = self._of(worker), worker.report
        alike = known.alike or known
        whole, handover = self._ttft_lines(worker, known, alike)
        step = _line(known.step, alike.step, self._slope(worker)) or self._any("step")
        answers = worker.num_answers
        return Figures(
            ttft=whole,
            step=step or DEFAULT_STEP,
            waiting_tokens=self.waiting_tokens(worker),
            answers=answers,
            held_tokens=0.0 if report is None else answers * _tokens_each(report),
            capacity_tokens=worker.capacity_tokens,
            max_answers=0 if report is None else report.max_running_reqs,
            handover=handover,
            paused=known.paused,
            is_guessed=step is None or whole is DEFAULT_TTFT,
        )

    def _ttft_lines(self, worker: Worker, known: _Known, alike: _Known) -> tuple[FittedLine, FittedLine]:
        """TTFT of whole requests, and what a pair's takes longer."""
        if worker.role is not Role.PREFILL:
            return _line(known.ttft, alike.ttft) or self._any("whole") or self._any("ttft") or DEFAULT_TTFT, NO_LINE
        whole, pair = _line(known.whole, alike.whole), _line(known.ttft, alike.ttft)
        handover_s = 0.0 if worker.report is None else worker.report.transfer_ms / 1000
        if pair is None:
            return whole or self._any("ttft") or DEFAULT_TTFT, FittedLine(handover_s, 0.0)
        if whole is None:
            return pair._replace(base_s=max(0.0, pair.base_s - handover_s)), FittedLine(handover_s, 0.0)
        return whole, FittedLine(max(0.0, pair.base_s - whole.base_s), max(0.0, pair.slope_s - whole.slope_s))

    def _slope(self, worker: Worker) -> float:
        """Slope of steps of all roles around their means, as noise would make one role cheaper."""
        fits = [known.step for (_, models), known in self._alike.items() if models == worker.models[:1]]
        xx = sum([fit.xx for fit in fits])
        return max(0.0, sum([fit.xy for fit in fits]) / xx) if xx > 1e-9 else 0.0

    def note_try(self, fit: LineFit, now_s: float) -> None:
        fit.news_s = max(fit.news_s, now_s)
        fit.num_tries += 1

    def _any(self, which: str) -> FittedLine | None:
        fits = (getattr(other, which) for other in self._alike.values())
        return next((fit.line for fit in fits if fit.is_known), None)

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.worker_id)
        if known is None:
            alike = self._alike.get(key := (worker.role, worker.models[:1]))
            if alike is None:
                ttft, whole = LineFit(ZERO_WEIGHT, KEEP_ALIKE), LineFit(ZERO_WEIGHT, KEEP_ALIKE)
                itl = LineFit(keep=KEEP_ALIKE)
                step = LineFit(keep=KEEP_ALIKE)
                alike = self._alike[key] = _Known(ttft=ttft, whole=whole, itl=itl, step=step)
            known = self._known[worker.worker_id] = _Known(alike)
        return known


def _line(own: LineFit, alike: LineFit, slope: float | None = None) -> FittedLine | None:
    """Few points of a loaded worker teach a wrong slope, so they only scale its role's line."""
    if alike.num_points < MIN_POINTS:
        return own.line if own.is_known else None
    line = alike.line if slope is None else alike.line_of(slope)
    if own is alike or own.num_points < MIN_POINTS or (usual_s := line.at(own.mean_x)) <= 0.0:
        return line
    scale = min(MAX_SCALE, max(1 / MAX_SCALE, own.mean_y / usual_s))
    return line.scaled(scale)


def _tokens_each(report: LoadReport) -> float:
    requests = report.running_reqs + sum(report.stages.get(stage, 0) for stage in _WITH_MEMORY)
    return (report.used_tokens + report.pending_tokens) / requests if requests else 0.0
