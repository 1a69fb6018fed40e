"""Prefixes of other workers: headers name sources of pages, answers are known where they lie."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import PromptCall, RequestContext
from router.choice.policies import RoutingHints
from router.choice.prefix_index import PrefixIndex
from router.history.forecast import Forecast
from router.pool.worker import Worker
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header


@dataclass(eq=False, kw_only=True)
class PrefixHeaders:
    """Names prefix sources in headers signed with `secret`. A `CallPart`."""

    worker_of: Callable[[int], Worker | None]
    secret: bytes
    num_named: int = 0

    def prepare(self, call: PromptCall) -> None:
        source = call.placement.source
        worker = None if source is None else self.worker_of(source.worker_id)
        if source is None or worker is None or worker.prefix is None:
            return
        at = worker.prefix
        named = PrefixSourceHeader(control=at.control, incarnation=at.incarnation, num_tokens=source.tokens)
        self.num_named += 1
        call.headers = {**call.headers, PREFIX_HEADER: write_header(named, self.secret)}

    def metrics(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        text = "Requests whose worker received the address of another with their prefix (--prefix-fetch)"
        yield CounterMetricFamily("tandem_router_prefix_sources", text, value=self.num_named)


# ---- where conversations lie


@dataclass(eq=False)
class Conversations:
    """An answer's worker holds prompt and answer. Before `forecast`, which counts tokens."""

    index: PrefixIndex
    forecast: Forecast
    _hints: dict[PairAttempt, RoutingHints] = field(default_factory=dict)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        if request.hints.keys:
            self._hints[attempt] = request.hints

    def on_attempt_ended(self, attempt: PairAttempt, now_s: float) -> None:
        hints = self._hints.pop(attempt, None)
        if hints is not None and attempt.completed:
            worker_id = attempt.answering.worker.worker_id
            num_tokens = self.forecast.num_events(attempt) or int(self.forecast.answer_tokens(hints.output_tokens))
            self.index.touch(worker_id, hints.keys)
            self.index.note_answer(worker_id, hints.keys, hints.data, num_tokens)
