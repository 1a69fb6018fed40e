"""The parts around the loop, with literals: stream gate, time line, interval log, receive skipper, watchdog, self-checks."""

import subprocess
import sys

import pytest

from engine.core.plan import Plan
from engine.core.policy import Priorities
from engine.core.request import Times, time_line
from engine.loop.heartbeat import EXIT_STATUS, dump_of_others
from engine.loop.listeners import FORCED_INTERVAL, IntervalLog, StreamGate
from engine.loop.reporter import RetractionLog, problems_of
from engine.messages import FinishReason, GenerateRequest, TokenLogprob, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest, plan_item

END = FinishReason(kind="length")


def told(gate: StreamGate, request: GenerateRequest, num_tokens: int) -> list[list[int]]:
    """The token ids (1, 2, ...) of each message that leaves the gate."""
    gate.on_received(request, 0.0)
    messages = []
    for n in range(1, num_tokens + 1):
        output = TokenOutput(
            rid=request.rid,
            new_ids=[n],
            completion_tokens=n,
            finish=END if n == num_tokens else None,
            logprobs=[TokenLogprob(-0.5, n)],
            input_logprobs=[TokenLogprob(None, 9)] if n == 1 else [],
        )
        for out in gate.pass_on([output]):
            assert [lp.token_id for lp in out.logprobs] == out.new_ids and out.completion_tokens == n
            messages.append(out.new_ids)
    return messages


def ask(**fields: object) -> GenerateRequest:
    sampling = SamplingParams(**fields.pop("sampling", {}))  # type: ignore[arg-type]
    return GenerateRequest(rid="r", input_ids=[1], sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "request_", "messages"),
    [
        (1, ask(stream=True), [[1], [2], [3], [4], [5], [6], [7], [8]]),
        (3, ask(stream=True), [[1], [2, 3, 4], [5, 6, 7], [8]]),
        (1, ask(stream=True, stream_interval=4), [[1], [2, 3, 4, 5], [6, 7, 8]]),
        (4, ask(stream=True, stream_interval=1), [[1], [2], [3], [4], [5], [6], [7], [8]]),
        (1, ask(), [[1], [2, 3, 4, 5, 6, 7, 8]]),
        (1, ask(sampling={"stop": ("x",)}), [[1], [2, 3, 4, 5, 6, 7, 8]]),
        (9, ask(sampling={"stop": ("x",), "min_new_tokens": 3}), [[1], [2, 3, 4, 5, 6, 7, 8]]),
    ],
)
def test_tokens_are_reported_every_interval(engine: int, request_: GenerateRequest, messages: list[list[int]]) -> None:
    assert told(StreamGate(interval=engine), request_, 8) == messages


def test_unstreamed_outputs_are_flushed_every_50() -> None:
    sizes = [len(ids) for ids in told(StreamGate(interval=1), ask(), 120)]
    assert sizes == [1, FORCED_INTERVAL, FORCED_INTERVAL, 19]


def test_prompt_logprobs_leave_with_the_first_token_and_an_abort_takes_what_is_held() -> None:
    gate = StreamGate(interval=5)
    gate.on_received(ask(stream=True), 0.0)
    first = TokenOutput(rid="r", new_ids=[7], completion_tokens=1, input_logprobs=[TokenLogprob(None, 9)])
    assert gate.pass_on([first]) == [first] and len(first.input_logprobs) == 1
    assert gate.pass_on([TokenOutput(rid="r", new_ids=[8], completion_tokens=2)]) == []
    (last,) = gate.pass_on([TokenOutput(rid="r", new_ids=[], completion_tokens=2, finish=FinishReason(kind="abort"))])
    assert last.new_ids == [8] and last.finish is not None


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (Times(), {}),
        (Times(arrived_s=1.0), {}),
        (
            Times(arrived_s=1.0, started_s=3.0, first_token_s=4.0),
            {"queue_time": 2, "prefill_time": 1, "decode_time": 5, "first_token_latency": 3, "decode_throughput": 2},
        ),
        (
            Times(arrived_s=1.0, queued_s=2.0, started_s=4.0, computed_s=7.0, first_token_s=9.0),
            {"bootstrap_time": 1, "queue_time": 2, "prefill_time": 3, "transfer_time": 2, "first_token_latency": 8},
        ),
        (
            Times(
                arrived_s=1.0, queued_s=2.0, landed_s=7.0, first_token_s=7.0, remote_queue_s=1.5, remote_prefill_s=2.0
            ),
            {
                "bootstrap_time": 1,
                "queue_time": 1.5,
                "prefill_time": 2,
                "transfer_time": 1.5,
                "decode_time": 2,
                "first_token_latency": 6,
                "decode_throughput": 5,
            },
        ),
    ],
)
def test_the_stages_of_a_request_partition_its_life(times: Times, line: dict[str, float]) -> None:
    tokens = 1 if times.computed_s is not None else 11
    found = time_line(times, ended_s=9.0, completion_tokens=tokens)
    assert found == line
    if times.started_s is not None or times.landed_s is not None:
        assert sum(v for k, v in found.items() if k.endswith("_time")) == 9.0 - 1.0


def test_a_line_per_interval_and_the_gauges_that_follow() -> None:
    engine = EngineInATest(page_size=4)
    lines: list[str] = []
    log = IntervalLog(engine.scheduler, steps=4, write=lines.append)
    for rid in ("a", "b"):
        engine.add(rid, list(range(9)), max_new_tokens=4)
        before = len(engine.plans)
        engine.run()
        for plan in engine.plans[before:]:
            log.on_launch(plan, float(len(lines)))
    assert lines[0] == "prefill: 1 steps, 1 new requests, 9 new tokens, 0 cached (0%), 0 running, 0 waiting, usage 0%"
    assert lines[2].startswith("prefill: 1 steps, 1 new requests, 1 new tokens, 8 cached (89%), ")
    assert [line.split(",")[0] for line in lines[1::2]] == ["decode: 3 steps"] * 2
    assert log.gauges()["cache_hit_rate"] == pytest.approx(8 / 9) and log.gauges()["gen_throughput"] > 0
    log.on_rest(9.0)
    assert len(lines) == 4 and log.gauges()["gen_throughput"] == 0.0


def test_a_rest_says_what_has_not_been_said_but_not_often() -> None:
    engine = EngineInATest()
    lines: list[str] = []
    log = IntervalLog(engine.scheduler, steps=100, write=lines.append)
    plan = Plan(seq=1, extend=True, items=[plan_item(extend=True)])
    for at_s, num_lines in ((0.0, 1), (0.5, 0), (1.5, 1)):
        lines.clear()
        log.on_launch(plan, at_s)
        assert lines == []
        log.on_rest(at_s)
        assert len(lines) == num_lines


STALLS = """
import threading
import time
from engine.loop.heartbeat import IterationClock
from engine.loop.heartbeat import Watchdog

def forever_in_here():
    threading.Event().wait(60)

turns = IterationClock(limit_s=0.2)
dog = Watchdog(turns)
dog.start()
turns.turning(time.monotonic())
forever_in_here()
"""


def test_a_stalled_process_shows_its_stacks_and_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", STALLS], capture_output=True, text=True, timeout=30)
    assert ended.returncode == EXIT_STATUS
    assert "forever_in_here" in ended.stderr and "--watchdog-timeout" in ended.stderr


HANGS = """
import threading
from engine.loop.heartbeat import dump_when_asked

def hangs_in_here():
    print("ready", flush=True)
    threading.Event().wait(60)

dump_when_asked()
hangs_in_here()
"""


def test_a_process_that_hangs_shows_its_stacks_to_the_one_that_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        dump_of_others([process.pid])
        process.kill()
        assert "hangs_in_here" in process.communicate(timeout=30)[1]


class Lines:
    """What a retraction log writes."""

    def __init__(self, engine: EngineInATest, role: str) -> None:
        self._lines: list[str] = []
        self._log = RetractionLog(engine.scheduler, role=role, write=self._lines.append)

    def at(self, now_s: float) -> list[str]:
        self._lines.clear()
        self._log.on_planned(now_s)
        return list(self._lines)


def test_running_out_of_memory_is_reported_once_in_a_while() -> None:
    engine = EngineInATest(page_size=4, num_pages=8, conservativeness=0.0)
    lines = Lines(engine, "unified")
    engine.add("long", [1, 2, 3, 4], max_new_tokens=24)
    engine.turn()
    engine.add("other", list(range(10, 18)), max_new_tokens=12)
    while not engine.scheduler.counters.retractions:
        assert lines.at(engine.now_s) == []
        engine.turn()
    ratio = engine.scheduler.ratio.value
    assert lines.at(0.0) == [
        "KV memory is full: retracted 1 request that held 12 tokens; 1 running, "
        f"new-token ratio {ratio:.2f}. If this happens often, raise --schedule-conservativeness or --mem-fraction-static"
    ]
    engine.scheduler.counters.out_of_memory += 2
    assert lines.at(4.9) == []
    assert lines.at(5.0)[0].startswith("KV memory is full: retracted 2 requests")
    assert lines.at(60.0) == []


def test_a_preemption_is_not_reported_as_a_lack_of_memory() -> None:
    engine = EngineInATest(max_running=1, priorities=Priorities())
    lines = Lines(engine, "decode")
    engine.add("low", [1], max_new_tokens=9)
    engine.turn()
    engine.add("high", [2], priority=50, max_new_tokens=2)
    engine.run()
    assert engine.scheduler.counters.retractions == 1 and lines.at(0.0) == []


def healthy() -> None:
    return None


def asserts() -> None:
    raise AssertionError("two owners of page 3")


def breaks() -> None:
    raise KeyError("r7")


def test_each_failure_is_reported_under_its_owner() -> None:
    found = problems_of({"healthy": healthy, "pages": asserts, "stages": breaks, "table": asserts})
    assert found == [
        "pages: two owners of page 3",
        "stages: its check failed: KeyError: 'r7'",
        "table: two owners of page 3",
    ]


def test_a_broken_scheduler_hides_no_other_finding() -> None:
    """A page that is lost and a row that is used twice, in one scheduler."""
    engine = EngineInATest()
    engine.add("r", [1, 2, 3], max_new_tokens=9)
    engine.turn()
    scheduler = engine.scheduler
    assert problems_of(scheduler.checks()) == []
    scheduler.memory.allocator.allocate(1)
    scheduler.table._free.append(scheduler.table._free[0])
    owners = [problem.split(":")[0] for problem in problems_of(scheduler.checks())]
    assert owners == ["request table", "scheduler"]


def test_the_interval_says_how_drafts_fared() -> None:
    lines: list[str] = []
    engine = EngineInATest(drafts="right", most_drafts=3)
    log = IntervalLog(engine.scheduler, steps=100, write=lines.append)
    engine.add("r", [1, 2, 3], max_new_tokens=40)
    while (plan := engine.next_plan()) is not None:
        log.on_launch(plan, 0.0)
        engine.launch(plan)
        engine.collect()
    log.on_rest(1.0)
    length, rate = (log.gauges()[name] for name in ("spec_accept_length", "spec_accept_rate"))
    assert 1.5 < length <= 4 and rate == 1.0
    assert f"{length:.2f} tokens a step and request" in lines[-1]
    log.on_launch(Plan(seq=99, extend=False, items=[plan_item(extend=False)]), 2.0)
    log.on_rest(9.0)
    assert log.gauges()["spec_accept_length"] == 1.0, "none was drafted lately"
    assert log.gauges()["spec_accept_rate"] == 1.0 and "tokens a step" not in lines[-1]
