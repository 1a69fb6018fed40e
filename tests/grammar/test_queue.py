"""The grammar queue with literals: what waits, is refused, is kept."""

import threading
from functools import partial

import pytest

from engine.core.request import StartGrammar
from engine.grammar.queue import MAX_GIVEN_UP, GrammarQueue, QueueLimits
from engine.messages import FinishReason, TokenOutput
from engine.sampling_params import GrammarInvalid, GrammarSpec
from tests.core.engine_in_a_test import request_of
from tests.e2e.cluster import wait_until
from tests.grammar.fixed import Fixed


class Scripted:
    """ "bad" does not compile, "crash" raises anything, "slow" and "slow..." wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.compiled: list[str] = []

    def prepare(self) -> None:
        """Nothing takes long."""

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        self.compiled.append(spec.source)
        if spec.source.startswith("slow"):
            assert self.gate.wait(300)
        if spec.source == "bad":
            raise GrammarInvalid("unclosed group")
        if spec.source == "crash":
            raise MemoryError("too big")
        return partial(Fixed, 9)


class Rig:
    def __init__(self, **options: int) -> None:
        self.compiler = Scripted()
        self.woken = threading.Event()
        self.queue = GrammarQueue(self.compiler, wakeup=self.woken.set, limits=QueueLimits(timeout_s=10.0, **options))
        self.ready: list[str] = []
        self.refused: dict[str, FinishReason] = {}

    def add(self, rid: str, regex: str, *, now_s: float = 0.0, field: str = "") -> None:
        request = request_of([1], rid=rid, arrived_s=now_s, regex=regex)
        self.take(self.queue.add(request, field=field, now_s=now_s))

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.finish is not None
            self.refused[output.rid] = output.finish

    def poll(self, now_s: float = 0.0) -> None:
        ready, outputs = self.queue.poll(now_s)
        assert all(request.grammar is not None for request in ready)
        self.ready += [request.rid for request in ready]
        self.take(outputs)

    def settle(self, *, now_s: float = 0.0) -> None:
        def is_empty() -> bool:
            self.poll(now_s)
            return not self.queue.rids()

        wait_until(is_empty, within_s=60, what="the queue to be empty")


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_grammar_is_compiled_once_and_each_request_has_its_own_state(rig: Rig) -> None:
    for rid in "abc":
        rig.add(rid, "x")
    rig.settle()
    rig.add("d", "x")
    rig.poll()
    assert rig.ready == ["a", "b", "c", "d"] and rig.compiler.compiled == ["x"]
    assert rig.queue.counters()["grammar_compiled"] == 1 and rig.queue.counters()["grammar_cache_hits"] == 1
    assert rig.woken.is_set()


def test_a_slow_grammar_does_not_hold_others_up_and_is_refused_in_time(rig: Rig) -> None:
    rig.add("slow", "slow", field="response_format")
    rig.add("fast", "x")
    wait_until(lambda: rig.poll() or "fast" in rig.ready, within_s=60, what="the fast one")
    rig.poll(now_s=9.9)
    assert rig.queue.rids() == ["slow"]
    rig.poll(now_s=10.0)
    finish = rig.refused["slow"]
    assert finish.status == 400 and finish.field == "response_format"
    assert "within 10 s" in finish.message and rig.queue.counters()["grammar_timeouts"] == 1
    rig.compiler.gate.set()  # too late for the first, in time for the second
    rig.add("again", "slow", now_s=11.0)
    rig.settle(now_s=11.0)
    assert "again" in rig.ready and rig.compiler.compiled.count("slow") == 1


@pytest.mark.parametrize(
    ("source", "says"), [("bad", "regex: unclosed group"), ("crash", "regex: MemoryError: too big")]
)
def test_a_grammar_that_does_not_compile_is_reported_and_remembered(rig: Rig, source: str, says: str) -> None:
    for rid in ("a", "b"):
        rig.add(rid, source)
        rig.settle()
        finish = rig.refused[rid]
        assert (finish.kind, finish.status, finish.field, finish.message) == ("abort", 400, "regex", says)
    assert rig.compiler.compiled == [source] and rig.ready == []


def test_the_cache_is_bounded_and_the_least_recently_used_goes() -> None:
    rig = Rig(max_cached=2)
    for i, source in enumerate(["a", "b", "a", "c", "a", "b"]):
        rig.add(f"r{i}", source)
        rig.settle()
    assert rig.compiler.compiled == ["a", "b", "c", "b"]


def test_an_abort_ends_the_wait(rig: Rig) -> None:
    rig.add("slow", "slow")
    rig.take(rig.queue.abort("slow"))
    assert (rig.refused["slow"].kind, rig.refused["slow"].status) == ("abort", 0)
    assert rig.queue.rids() == [] and rig.queue.abort("slow") == []
    rig.compiler.gate.set()
    rig.poll()
    assert rig.ready == []


def test_the_queue_is_bounded_and_names_are_unique() -> None:
    rig = Rig(max_waiting=1)
    rig.add("a", "slow")
    rig.add("b", "x")
    assert rig.refused["b"].status == 503
    rig.compiler.gate.set()
    rig.settle()
    rig = Rig()
    rig.add("a", "slow")
    rig.add("a", "x")
    assert rig.refused["a"].field == "rid" and rig.queue.rids() == ["a"]
    rig.compiler.gate.set()


def test_a_compilation_without_waiting_requests_is_not_begun() -> None:
    rig = Rig(num_threads=1)
    rig.add("a", "slow")
    rig.add("b", "never")
    rig.queue.abort("b")
    rig.compiler.gate.set()
    rig.settle()
    rig.add("c", "x")
    rig.settle()
    assert rig.compiler.compiled == ["slow", "x"]


def test_grammars_that_never_compile_hold_no_others_up() -> None:
    rig = Rig(num_threads=2)
    for i in range(2):
        rig.add(f"endless {i}", f"slow {i}")
    wait_until(lambda: rig.poll() or len(rig.compiler.compiled) == 2, within_s=60, what="both threads are taken")
    rig.poll(now_s=10.0)
    assert set(rig.refused) == {"endless 0", "endless 1"}
    rig.add("good", "x", now_s=10.0)
    rig.settle(now_s=10.0)
    assert rig.ready == ["good"]
    rig.add("patient", "slow 0", now_s=11.0)  # the compilation that was given up still runs: it is not begun again
    rig.compiler.gate.set()
    rig.settle(now_s=11.0)
    assert rig.ready == ["good", "patient"] and rig.compiler.compiled.count("slow 0") == 1


def test_beyond_a_bound_of_endless_compilations_new_grammars_are_refused_until_one_ends() -> None:
    rig = Rig(num_threads=1)
    rig.add("before", "x")
    rig.settle()
    for i in range(MAX_GIVEN_UP):
        now_s = 100.0 * i
        rig.add(f"endless {i}", f"slow {i}", now_s=now_s)
        begun = i + 2
        wait_until(lambda n=begun, s=now_s: rig.poll(s) or len(rig.compiler.compiled) == n, within_s=60, what="it runs")
        rig.poll(now_s=now_s + 10.0)
    rig.add("new", "y", now_s=1000.0)
    finish = rig.refused["new"]
    assert finish.status == 503 and "not compiled in time" in finish.message
    rig.add("known", "x", now_s=1000.0)
    rig.poll(now_s=1000.0)
    assert rig.ready == ["before", "known"]
    rig.compiler.gate.set()

    def is_taken() -> bool:
        rig.add("later", "y", now_s=1001.0)
        rig.poll(now_s=1001.0)
        return "later" in rig.queue.rids() or "later" in rig.ready

    rig.add("waits", "slow 0", now_s=1001.0)
    wait_until(is_taken, within_s=60, what="a compilation has ended")
    rig.settle(now_s=1001.0)
    assert {"waits", "later"} <= set(rig.ready)


def test_grammars_may_be_off() -> None:
    (output,) = GrammarQueue(None).add(request_of([1], regex="x"), field="", now_s=0.0)
    assert output.finish is not None and output.finish.status == 400 and "--grammar-backend" in output.finish.message
