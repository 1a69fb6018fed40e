"""Requests wait here, outside the scheduler, until a thread has compiled their grammar.

    add --cached--> ready --poll--> role.add
       \\--compiling (a thread)--> ready, or refused: it does not compile, or not in time

Owns the waiting requests and the LRU cache of compiled grammars, failed ones included. Only the loop's thread calls it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.core.hooks import Grammar, StartGrammar
from engine.core.outputs import refused
from engine.core.request import Request
from engine.core.scheduler import ABORTED
from engine.grammar.reasoning import ReasoningGates
from engine.grammar.threads import CompileThreads
from engine.grammar.token_rules import rules_of
from engine.messages import FinishReason, TokenOutput
from engine.sampling_params import GrammarInvalid, GrammarSpec

Compiled = StartGrammar | GrammarInvalid

MAX_GIVEN_UP = 4  # compilations that overran their time and still run
COMPILE_TIMEOUT_S = 10.0  # a client waits that long; nearly all compile in milliseconds
MAX_CACHED = 256  # grammars; an agent with many tools has some dozens


class Compiler(Protocol):
    """What turns grammars into states (compiler.py). Called from several threads at once."""

    def prepare(self) -> None:
        """Do what takes long for any grammar; else the first `compile` does it."""

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        """Raises GrammarInvalid."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """`field`: what the client calls the grammar; an error names it."""

    request: Request
    spec: GrammarSpec
    field: str
    deadline_s: float


class GrammarQueue:
    """`compiler=None`: grammars are off. `gates`: of the model's reasoning, needed by requests that name it. `vocab_size`: rows of its logits; `eos_ids`: its end tokens. `wakeup` is called from a thread when a grammar is compiled."""

    def __init__(
        self,
        compiler: Compiler | None,
        *,
        gates: ReasoningGates | None = None,
        vocab_size: int = 0,
        eos_ids: Sequence[int] = (),
        wakeup: Callable[[], None] = lambda: None,
        timeout_s: float = COMPILE_TIMEOUT_S,
        max_cached: int = MAX_CACHED,
        max_waiting: int = 4096,
        num_threads: int = 2,
    ) -> None:
        assert max_cached >= 1 and num_threads >= 1
        self._gates = gates
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._timeout_s = timeout_s
        self._max_cached = max_cached
        self._max_waiting = max_waiting
        self._threads: CompileThreads[Compiled] | None = None
        if compiler is not None:
            self._threads = CompileThreads(
                partial(_compiled, compiler),
                prepare=compiler.prepare,
                wakeup=wakeup,
                num_threads=num_threads,
                max_given_up=MAX_GIVEN_UP,
                timeout_s=timeout_s,
            )
        self._waiting: dict[str, _Waiting] = {}
        self._cache: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._counters: Counter[str] = Counter()

    def add(self, request: Request, *, field: str, now_s: float) -> list[TokenOutput]:
        """Take a request with a grammar; `poll` returns it. Or refuse it."""
        spec = request.sampling.grammar
        assert spec is not None
        field = field or spec.kind
        if self._threads is None:
            return [_refused(request, field, "grammars are off on this server (--grammar-backend none)")]
        if request.rid in self._waiting:
            return [_refused(request, "rid", f"a request with id {request.rid!r} is running")]
        if len(self._waiting) >= self._max_waiting:
            return [_refused(request, field, f"{self._max_waiting} requests wait for a grammar", status=503)]
        if spec in self._cache:
            self._counters["grammar_cache_hits"] += 1
        elif spec not in self._threads:
            if self._threads.is_stuck:
                return [_refused(request, field, STUCK, status=503)]
            self._counters["grammar_compiled"] += 1
            self._threads.ask(spec, now_s)
        self._waiting[request.rid] = _Waiting(request, spec, field, now_s + self._timeout_s)
        return []

    def poll(self, now_s: float) -> tuple[list[Request], list[TokenOutput]]:
        """Requests whose grammar is ready, in order of arrival, and answers to those that will never have one."""
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
                late = f"did not compile within {self._timeout_s:g} s; simplify it"
                outputs.append(_refused(waiting.request, waiting.field, late))
            else:
                continue
            self._forget(waiting)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return ready, outputs

    def state_of(self, request: Request, grammar: Grammar | None) -> Grammar | None:
        """`grammar` (None: the answer is free) under the token rules and behind the reasoning that the request has.

        It stands behind the tokens that another worker generated.
        """
        state = self._begin(request, grammar)
        if state is not None:
            for token in request.output_ids:
                state.accept(token)
        return state

    def _begin(self, request: Request, grammar: Grammar | None) -> Grammar | None:
        sampling, gate = request.sampling, request.sampling.reasoning
        rules = partial(rules_of, sampling, vocab_size=self._vocab_size, eos_ids=self._eos_ids)
        if grammar is not None or gate is None:
            grammar = rules(grammar)
        if gate is None:
            return grammar
        assert self._gates is not None
        return rules(self._gates.behind(gate, grammar), yields=True)

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        waiting = self._waiting.get(rid)
        if waiting is None:
            return []
        self._forget(waiting)
        return [refused(waiting.request, reason)]

    def rids(self) -> list[str]:
        return list(self._waiting)

    def counters(self) -> dict[str, float]:
        return {name: float(self._counters[name]) for name in COUNTERS}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def _cached(self, spec: GrammarSpec) -> Compiled | None:
        if spec not in self._cache:
            return None
        self._cache.move_to_end(spec)
        return self._cache[spec]

    def _forget(self, waiting: _Waiting) -> None:
        """Drop its compilation too if no other request waits for that and it has not begun."""
        del self._waiting[waiting.request.rid]
        if self._threads is not None and not any(w.spec == waiting.spec for w in self._waiting.values()):
            self._threads.forget(waiting.spec)


STUCK = (
    f"{MAX_GIVEN_UP} grammars have not compiled in time and still run; "
    "grammars that were compiled before work, others when one of these ends"
)
COUNTERS = ("grammar_compiled", "grammar_cache_hits", "grammar_failed", "grammar_timeouts")


def _compiled(compiler: Compiler, spec: GrammarSpec) -> Compiled:
    """Compile the grammar, or return why not: an error of any kind ends one request, not the thread."""
    try:
        return compiler.compile(spec)
    except GrammarInvalid as error:
        return error
    except Exception as error:
        return GrammarInvalid(f"{type(error).__name__}: {error}")


def _refused(request: Request, field: str, message: str, *, status: int = 400) -> TokenOutput:
    return refused(request, FinishReason(kind="abort", message=f"{field}: {message}", status=status, field=field))
