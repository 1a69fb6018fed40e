"""Requests that wait for their grammar, outside the scheduler.

add --cached--> ready --poll--> role.add
 \\--compiling (a thread)--> ready, or rejected: compile error or timeout

Owns the waiting requests and the LRU cache of compiled grammars, failed ones included.
Single-threaded.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from engine.core.outputs import refused
from engine.core.request import Grammar, Request, StartGrammar
from engine.core.scheduler import ABORTED
from engine.grammar.reasoning import ReasoningGates
from engine.grammar.token_rules import rules_of
from engine.messages import FinishReason, TokenOutput
from engine.sampling_params import GrammarInvalid, GrammarSpec

LOWEST_PRIORITY = 19

Found = TypeVar("Found")


@dataclass(slots=True, eq=False)
class _Compilation(Generic[Found]):
    """The thread writes `found` and `thread_id`, the loop the rest."""

    begun_s: float
    thread_id: int | None = None
    found: Found | None = None


@dataclass(eq=False)
class CompileThreads(Generic[Found]):
    """At most `num_threads` compilations; a timed-out one gets a replacement thread.

    `ask` --> pending --> running --> done
                 |
                 overdue --> given up --> done (late), or never

    No library can stop a compilation, so it continues at the lowest CPU priority; a late result
    counts. Single-threaded caller. `compile_` never raises.
    """

    compile_: InitVar[Callable[[GrammarSpec], Found]]
    _: KW_ONLY
    prepare: Callable[[], None]
    wakeup: Callable[[], None]
    num_threads: int
    max_given_up: int
    timeout_s: float

    def __post_init__(self, compile_: Callable[[GrammarSpec], Found]) -> None:
        assert self.num_threads >= 1 and self.max_given_up >= 1
        self._compile = compile_
        self._prepared = threading.Event()
        self._pending: dict[GrammarSpec, None] = {}
        self._running: dict[GrammarSpec, _Compilation[Found]] = {}
        self._given_up: dict[GrammarSpec, _Compilation[Found]] = {}
        self._closed = False
        threading.Thread(target=self._get_prepared, name="grammar prepare", daemon=True).start()

    @property
    def is_stuck(self) -> bool:
        return len(self._given_up) >= self.max_given_up

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._pending or spec in self._running or spec in self._given_up

    def ask(self, spec: GrammarSpec, now_s: float) -> None:
        assert spec not in self
        self._pending[spec] = None
        self._begin(now_s)

    def forget(self, spec: GrammarSpec) -> None:
        self._pending.pop(spec, None)

    def poll(self, now_s: float) -> dict[GrammarSpec, Found]:
        """Collect results, give up overdue compilations, start pending ones."""
        found = {**_take_done(self._given_up), **_take_done(self._running)}
        for spec in [s for s, one in self._running.items() if now_s - one.begun_s >= self.timeout_s]:
            self._given_up[spec] = self._running.pop(spec)
            _lower_priority(self._given_up[spec].thread_id)
        self._begin(now_s)
        return found

    def close(self) -> None:
        """Start nothing more. Running threads are daemons."""
        self._closed = True

    def _begin(self, now_s: float) -> None:
        while self._pending and len(self._running) < self.num_threads and self._prepared.is_set() and not self._closed:
            spec = next(iter(self._pending))
            del self._pending[spec]
            one = self._running[spec] = _Compilation[Found](now_s)
            threading.Thread(target=self._run, args=(spec, one), name="grammar", daemon=True).start()

    def _run(self, spec: GrammarSpec, one: _Compilation[Found]) -> None:
        one.thread_id = threading.get_native_id()
        one.found = self._compile(spec)
        self.wakeup()

    def _get_prepared(self) -> None:
        try:
            self.prepare()
        finally:  # a failure recurs at the first compilation and reaches its request
            self._prepared.set()
            self.wakeup()


def _take_done(compilations: dict[GrammarSpec, _Compilation[Found]]) -> dict[GrammarSpec, Found]:
    done = {spec: one.found for spec, one in compilations.items() if one.found is not None}
    for spec in done:
        del compilations[spec]
    return done


def _lower_priority(thread_id: int | None) -> None:
    """Linux threads have their own priority."""
    with contextlib.suppress(OSError):
        if thread_id is not None:
            os.setpriority(os.PRIO_PROCESS, thread_id, LOWEST_PRIORITY)


Compiled = StartGrammar | GrammarInvalid

MAX_GIVEN_UP = 4  # timed-out compilations that still run
COMPILE_TIMEOUT_S = 10.0  # nearly all compile in milliseconds
MAX_CACHED = 256  # grammars; an agent with many tools has dozens


class Compiler(Protocol):
    """Compiles grammars (compiler.py), thread-safe."""

    def prepare(self) -> None:
        """Do slow work that all grammars share."""

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        """Raises GrammarInvalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """`timeout_s`: of a compilation. `max_cached`: grammars. `max_waiting`: requests."""

    timeout_s: float = COMPILE_TIMEOUT_S
    max_cached: int = MAX_CACHED
    max_waiting: int = 4096
    num_threads: int = 2


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    spec: GrammarSpec
    field: str
    deadline_s: float


@dataclass(eq=False)
class GrammarQueue:
    """`compiler`: None turns grammars off. `gates`: of reasoning. `vocab_size`: of the logits.

    `wakeup`: called from a thread when a grammar is compiled.
    """

    compiler: Compiler | None
    _: KW_ONLY
    gates: ReasoningGates | None = None
    vocab_size: int = 0
    eos_ids: Sequence[int] = ()
    wakeup: Callable[[], None] = lambda: None
    limits: QueueLimits = QueueLimits()

    def __post_init__(self) -> None:
        assert self.limits.max_cached >= 1 and self.limits.num_threads >= 1
        self._threads: CompileThreads[Compiled] | None = None
        if self.compiler is not None:
            self._threads = CompileThreads(
                partial(_compiled, self.compiler),
                prepare=self.compiler.prepare,
                wakeup=self.wakeup,
                num_threads=self.limits.num_threads,
                max_given_up=MAX_GIVEN_UP,
                timeout_s=self.limits.timeout_s,
            )
        self._waiting: dict[str, _Waiting] = {}
        self._cache: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._counters = dict.fromkeys(COUNTERS, 0)

    def add(self, request: Request, *, field: str, now_s: float) -> list[TokenOutput]:
        spec = request.sampling.grammar
        assert spec is not None
        field = field or spec.kind
        if self._threads is None:
            return [_refused(request, field, "grammars are off on this server (--grammar-backend none)")]
        if request.rid in self._waiting:
            return [_refused(request, "rid", f"a request with id {request.rid!r} is running")]
        if len(self._waiting) >= self.limits.max_waiting:
            return [_refused(request, field, f"{self.limits.max_waiting} requests wait for a grammar", status=503)]
        if spec in self._cache:
            self._counters["grammar_cache_hits"] += 1
        elif spec not in self._threads:
            if self._threads.is_stuck:
                return [_refused(request, field, STUCK, status=503)]
            self._counters["grammar_compiled"] += 1
            self._threads.ask(spec, now_s)
        self._waiting[request.rid] = _Waiting(request, spec, field, now_s + self.limits.timeout_s)
        return []

    def poll(self, now_s: float) -> tuple[list[Request], list[TokenOutput]]:
        """Ready requests in order of arrival, and rejections."""
        if not self._waiting or self._threads is None:
            return [], []
        self._cache.update(self._threads.poll(now_s))
        ready: list[Request] = []
        outputs: list[TokenOutput] = []
        for waiting in list(self._waiting.values()):
            compiled = self._cached(waiting.spec)
            if isinstance(compiled, GrammarInvalid):
                self._counters["grammar_failed"] += 1
                outputs.append(_refused(waiting.request, waiting.field, str(compiled)))
            elif compiled is not None:
                grammar = waiting.request.grammar = self.state_of(waiting.request, compiled())
                if grammar is not None and waiting.request.sampling.has_token_rules and grammar.problem:
                    outputs.append(_refused(waiting.request, waiting.field, grammar.problem))
                else:
                    ready.append(waiting.request)
            elif now_s >= waiting.deadline_s:
                self._counters["grammar_timeouts"] += 1
                late = f"did not compile within {self.limits.timeout_s:g} s; simplify it"
                outputs.append(_refused(waiting.request, waiting.field, late))
            else:
                continue
            self._forget(waiting)
        while len(self._cache) > self.limits.max_cached:
            self._cache.popitem(last=False)
        return ready, outputs

    def state_of(self, request: Request, grammar: Grammar | None) -> Grammar | None:
        """Combine `grammar` with the request's token rules and reasoning, after its tokens."""
        state = self._begin(request, grammar)
        if state is not None:
            for token in request.output_ids:
                state.accept(token)
        return state

    def _begin(self, request: Request, grammar: Grammar | None) -> Grammar | None:
        sampling, gate = request.sampling, request.sampling.reasoning
        rules = partial(rules_of, sampling, vocab_size=self.vocab_size, eos_ids=self.eos_ids)
        if grammar is not None or gate is None:
            grammar = rules(grammar)
        if gate is None:
            return grammar
        assert self.gates is not None
        return rules(self.gates.behind(gate, grammar), yields=True)

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        waiting = self._waiting.get(rid)
        if waiting is None:
            return []
        self._forget(waiting)
        return [refused(waiting.request, reason)]

    def rids(self) -> list[str]:
        return list(self._waiting)

    def counters(self) -> dict[str, float]:
        return {**self._counters}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def _cached(self, spec: GrammarSpec) -> Compiled | None:
        if spec not in self._cache:
            return None
        self._cache.move_to_end(spec)
        return self._cache[spec]

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.request.rid]
        if self._threads is not None and not any(w.spec == waiting.spec for w in self._waiting.values()):
            self._threads.forget(waiting.spec)


STUCK = (
    f"{MAX_GIVEN_UP} grammars have not compiled in time and still run; "
    "grammars that were compiled before work, others when one of these ends"
)
COUNTERS = ("grammar_compiled", "grammar_cache_hits", "grammar_failed", "grammar_timeouts")


def _compiled(compiler: Compiler, spec: GrammarSpec) -> Compiled:
    """Any error must end one request, not the thread."""
    try:
        return compiler.compile(spec)
    except GrammarInvalid as error:
        return error
    except Exception as error:
        return GrammarInvalid(f"{type(error).__name__}: {error}")


def _refused(request: Request, field: str, message: str, *, status: int = 400) -> TokenOutput:
    return refused(request, FinishReason(kind="abort", message=f"{field}: {message}", status=status, field=field))
