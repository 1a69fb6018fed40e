"""What the dashboard remembers and makes of it: quantiles, the recorder, the picture. No sockets."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import Events
from router.attempts.upstream_call import FailedWorkers
from router.history.recorder import (
    KEPT_REQUESTS,
    KEPT_SECONDS,
    MAX_RUNNING,
    MIN_S,
    DashboardSnapshot,
    Recorder,
    RequestTraces,
    add,
    bucket_of,
    quantile,
)
from router.http.dashboard import SHOWN_REQUESTS, SHOWN_SECONDS, draw, merge, pick_records
from router.pool.worker import LoadReport, Role
from router.pool.workers import WorkerTable
from service.telemetry.context import Tracer, TracesQuery
from tests.router.attempts import Launched, ScriptedReply, make_request


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


class Life:
    """A request as its events reach the recorder and the trace. Times are the clock's."""

    def __init__(self, recorder: Recorder, name: str = "id", *, tracer: Tracer | None = None) -> None:
        self.clock = recorder.now_s
        traces = RequestTraces(tracer or Tracer(ring_size=0), recorder)
        self.events = Events(
            on_routed=(traces.on_routed,),
            on_sent=(traces.on_sent, recorder.on_sent),
            on_first_byte=(recorder.on_first_byte,),
            on_chunk=(recorder.on_chunk,),
            on_attempt_failed=(traces.on_attempt_failed,),
            on_ended=(traces.on_ended,),
        )
        self.launched = Launched(events=self.events, clock=self.clock)
        self.request = make_request(name, now_s=self.clock())
        for tell in self.events.on_routed:
            tell(self.request)

    def sent(self, decode: str = "http://d0") -> tuple[PairAttempt, ScriptedReply, ScriptedReply]:
        self.attempt, prefill, answer = self.launched.pair(self.request, decode=decode)
        return self.attempt, prefill, answer

    def failed(self, attempt: PairAttempt) -> None:
        failure = attempt.answering.failure()
        assert failure is not None
        self.request.failed = FailedWorkers(failure)
        for tell in self.events.on_attempt_failed:
            tell(self.request, attempt, failure, self.clock())
        attempt.end()

    def first_byte(self) -> None:
        now_s = self.clock()
        for tell in self.events.on_first_byte:
            tell(self.request, self.attempt, now_s)
        self.request.first_byte_s = self.request.last_byte_s = now_s
        self.request.num_chunks = 1

    def chunk(self) -> None:
        now_s = self.clock()
        for tell in self.events.on_chunk:
            tell(self.request, self.attempt, b"x", now_s)
        self.request.last_byte_s = now_s
        self.request.num_chunks += 1

    def end(self, status: int = 200, *, failure: str = "") -> None:
        self.request.failure = failure
        for tell in self.events.on_ended:
            tell(self.request, status, self.clock())


@settings(max_examples=100)
@given(st.lists(st.floats(MIN_S * 2, 1000.0), min_size=1, max_size=50), st.sampled_from((0.01, 0.5, 0.9, 0.99, 1.0)))
def test_a_quantile_is_off_by_six_percent_at_most(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        add(counts, {bucket_of(value): 1})
    exact = sorted(values)[max(1, -int(-share * len(values) // 1)) - 1]
    found = quantile(counts, share)
    assert found is not None and abs(found / exact - 1) < 0.065


def test_times_between_tokens_failed_attempts_and_spans_are_kept() -> None:
    clock = Clock()
    recorder, tracer = Recorder(clock), Tracer(ring_size=4)
    life = Life(recorder, "mine", tracer=tracer)
    first, _, decode = life.sent("http://d0")
    decode.answer(500)
    life.failed(first)
    _, prefill, _ = life.sent("http://d1")
    clock.now += 0.25
    prefill.answer(200)
    life.first_byte()
    for _ in range(3):
        clock.now += 0.125
        life.chunk()
    life.end()
    (second,) = recorder.snapshot().seconds
    assert (second.retried, second.failed, second.gaps) == (1, 0, {bucket_of(0.125): 3})
    (traced,) = tracer.ring.find(TracesQuery(ids=["mine"]))
    spans = [(s.name, s.attributes.get("url.full"), s.attributes.get("error.type")) for s in traced.spans]
    assert spans == [
        ("prefill leg", "http://p0", "lost"),
        ("decode leg", "http://d0", "500"),
        ("prefill leg", "http://p0", None),
        ("decode leg", "http://d1", None),
        ("answer", None, None),
    ]


def test_what_counts_as_a_failure() -> None:
    recorder = Recorder(Clock())
    for status, broken in ((200, ""), (400, ""), (429, ""), (499, ""), (499, "cut"), (502, ""), (200, "broke off")):
        Life(recorder).end(status, failure=broken)
    shown = [record.failure for record in recorder.snapshot().records]
    assert shown == ["", "HTTP 400", "HTTP 429", "the client went away", "cut", "HTTP 502", "broke off"]
    (second,) = recorder.snapshot().seconds
    assert (second.ended, second.failed) == (7, 2)  # not the client's own mistakes, nor clients that left


def test_memory_is_bounded() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    running = [Life(recorder, "x" * 1000) for _ in range(MAX_RUNNING + 5)]
    assert len(recorder.snapshot().records) == MAX_RUNNING
    for life in running:
        clock.now += 1.0
        life.end(failure="y" * 1000)
    snapshot = recorder.snapshot()
    assert len(snapshot.records) == KEPT_REQUESTS and len(snapshot.seconds) == KEPT_SECONDS
    assert max(len(r.request_id) + len(r.failure) for r in snapshot.records) < 500


def test_what_workers_count_becomes_rates_and_a_new_process_is_no_negative_one() -> None:
    recorder = Recorder(Clock())
    old = LoadReport(prompt_tokens_total=100, cached_tokens_total=40, output_tokens_total=50, kv_bytes_total=1000)
    new = LoadReport(prompt_tokens_total=130, cached_tokens_total=52, output_tokens_total=70, kv_bytes_total=4000)
    recorder.on_report(Role.PREFILL, None, old)  # nothing to compare with
    recorder.on_report(Role.PREFILL, old, None)
    recorder.on_report(Role.PREFILL, old, new)
    recorder.on_report(Role.DECODE, old, new)
    recorder.on_report(Role.PREFILL, new, LoadReport())
    (second,) = recorder.snapshot().seconds
    assert (second.prompt_tokens, second.cached_tokens, second.output_tokens, second.kv_bytes) == (30, 12, 20, 3000)
    merged = merge([recorder.snapshot(), recorder.snapshot()])
    picture = draw(merged, WorkerTable(), now_s=recorder.now_s() + 2)
    assert picture["window"]["cache_hit_rate"] == 0.4 and picture["series"]["cache_hit_rate"][-1] == 0.4
    assert draw(Recorder(Clock()).snapshot(), WorkerTable(), now_s=1002)["window"]["cache_hit_rate"] is None


def test_processes_are_added_up_but_for_what_all_of_them_hear() -> None:
    clock = Clock()
    pair = [Recorder(clock, place=place) for place in (0, 1)]
    for recorder in pair:
        life = Life(recorder)
        attempt, _, decode = life.sent()
        life.first_byte()
        life.end()
        decode.close()
        failure = attempt.answering.failure()
        assert failure is not None
        recorder.on_call_failed(failure, clock.now)
        recorder.on_report(Role.UNIFIED, LoadReport(), LoadReport(output_tokens_total=7))
    snapshots = [recorder.snapshot() for recorder in pair]
    snapshots[1].switching["http://w:1"] = "decode"  # one of them moves it, all show it
    encoded = [msgspec.json.encode(snapshot) for snapshot in snapshots]
    whole = merge(msgspec.json.decode(body, type=DashboardSnapshot) for body in encoded)
    table = WorkerTable()
    table.add("http://w:1", role=Role.PREFILL)
    assert draw(whole, table, now_s=clock.now)["workers"][0]["switching_to"] == "decode"
    assert [r.key for r in whole.records] == ["0-1", "1-1"]
    (second,) = whole.seconds
    assert (second.arrived, second.ended, second.output_tokens) == (2, 2, 7)
    assert second.failures == {"decode lost": 2} and sum(second.ttft.values()) == 2


def test_the_picture_speaks_of_the_last_minute_and_draws_two() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    for _ in range(200):  # one a second, 0.5 s to the first token
        life = Life(recorder)
        life.sent()
        clock.now += 0.5
        life.first_byte()
        life.end()
        clock.now += 0.5
    table = WorkerTable()
    table.loads.on_report(table.add("http://w:1", role=Role.UNIFIED), LoadReport(stages={"running": 3}))
    picture = msgspec.json.decode(msgspec.json.encode(draw(merge([recorder.snapshot()]), table, now_s=clock.now)))
    window, series = picture["window"], picture["series"]
    assert window["seconds"] == 60 and window["requests_per_s"] == 1.0 and window["ended"] == 60
    assert abs(window["ttft"]["p50"] / 0.5 - 1) < 0.065 and window["gap"]["p50"] is None
    assert {len(curve) for curve in series.values()} == {SHOWN_SECONDS}
    assert sum(series["requests"]) == KEPT_SECONDS - 1 and series["ttft_p50"][-1] is not None
    assert picture["workers"][0]["report"]["stages"] == {"running": 3}
    assert len(picture["requests"]) == SHOWN_REQUESTS


def test_a_router_that_just_began_divides_by_the_time_it_has_run() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    for _ in range(6):
        Life(recorder).end()
    clock.now += 3.0
    window = draw(recorder.snapshot(), WorkerTable(), now_s=clock.now)["window"]
    assert (window["seconds"], window["requests_per_s"]) == (3, 2.0)


def test_running_requests_are_shown_before_ended_ones() -> None:
    recorder = Recorder(Clock())
    Life(recorder, "runs")
    for i in range(KEPT_REQUESTS):
        Life(recorder, f"{i}").end()
    shown = pick_records(recorder.snapshot().records)
    assert shown[0].request_id == "runs" and shown[0].ended_s is None and len(shown) == SHOWN_REQUESTS
