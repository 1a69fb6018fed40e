"""Six loads to choose routes for: conversations, bursts, retrieval, agents, and Mooncake's two traces. Pure.

A rate stretches the gaps between requests of a trace, and between conversations, not between the turns of one. A later turn waits for the
answer before it, and its prompt holds that answer.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from deploy.bench.workload import read_trace
from planner.executor import TOKEN
from planner.goodput import SloTargets
from planner.workload import FIRST_BLOCK, FIRST_OWN, Blocks, PlannedRequest, from_trace, split
from router.attempts.request import ITL_HEADER, TTFT_HEADER

SEED = 7
SHARE = 0.9
Range = tuple[int, int]
Requests = tuple[list[PlannedRequest], list[PlannedRequest]]  # before a run, and of it


def headers_of(slo: SloTargets) -> dict[str, str]:
    """Of a request, for the router."""
    return {TTFT_HEADER: f"{1000 * slo.ttft_s:.0f}", ITL_HEADER: f"{1000 * slo.tpot_s:.1f}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Conversations: tokens of what `groups` of them share, of a first and a later prompt, of an answer; `turns`, and the pause between."""

    shared: int
    groups: int
    first: Range
    later: Range
    answer: Range
    turns: Range
    gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag:
    """A question after `documents` of `size` tokens, some of `num` read more often than others (Zipf)."""

    shared: int
    documents: Range
    size: int
    num: int
    question: Range
    answer: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """`at_once` prompts of strangers, then a pause."""

    at_once: int
    prompt: Range
    answer: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One of Mooncake's. `prompts`, `answers`: factors on its lengths."""

    file: str
    prompts: float = 1.0
    answers: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`ttft_s`, `tpot_s`: objectives on planned GPUs. `guess`: requests a second of the whole, to begin a search with."""

    name: str
    kind: Talk | Rag | Burst | Trace
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    guess: float = 0.0
    requests: int = 600  # many times as long as a request, or the load stays that of a start

    @property
    def slo(self) -> SloTargets:
        return SloTargets(ttft_s=self.ttft_s, tpot_s=self.tpot_s, itl_s=None, share=SHARE)


CHAT = Talk(shared=400, groups=4, first=(50, 600), later=(20, 300), answer=(40, 250), turns=(2, 10), gap_s=8)
AGENTS = Talk(shared=8000, groups=2, first=(200, 4000), later=(200, 2500), answer=(40, 250), turns=(15, 45), gap_s=3)
RAG = Rag(shared=300, documents=(4, 10), size=1000, num=2000, question=(20, 120), answer=(50, 250))
LOADS = (
    Load(name="chat", kind=CHAT, ttft_s=0.3, tpot_s=0.012, guess=85, requests=2400),
    Load(
        name="bursts",
        kind=Burst(at_once=16, prompt=(1000, 6000), answer=(50, 300)),
        ttft_s=1,
        tpot_s=0.03,
        guess=12,
        requests=2400,
    ),
    Load(name="RAG", kind=RAG, ttft_s=1, tpot_s=0.03, guess=14),
    Load(name="agents", kind=AGENTS, ttft_s=1.5, tpot_s=0.025, guess=10),
    Load(name="conversation", kind=Trace(file="conversation_trace.jsonl.gz"), ttft_s=10, tpot_s=0.03, guess=4),
    Load(name="synthetic", kind=Trace(file="synthetic_trace.jsonl.gz"), ttft_s=10, tpot_s=0.03, guess=4),
)


SHORT = (  # for two cores
    Load(
        name="chat",
        kind=Talk(shared=64, groups=2, first=(20, 120), later=(10, 80), answer=(12, 60), turns=(2, 6), gap_s=1.5),
    ),
    Load(name="bursts", kind=Burst(at_once=6, prompt=(100, 600), answer=(6, 30))),
    Load(name="RAG", kind=Rag(shared=48, documents=(3, 6), size=96, num=60, question=(16, 64), answer=(8, 40))),
    Load(
        name="agents",
        kind=Talk(shared=512, groups=1, first=(32, 256), later=(32, 160), answer=(8, 40), turns=(5, 9), gap_s=0.5),
    ),
    Load(name="conversation", kind=Trace(file="conversation_trace.jsonl.gz", prompts=0.03, answers=0.08)),
    Load(name="synthetic", kind=Trace(file="synthetic_trace.jsonl.gz", prompts=0.025, answers=0.12)),
)


def requests_of(load: Load, *, rate: float, traces: str, count: int = 0, fresh: bool = False) -> Requests:
    """History, and `count` (`load.requests`) requests at `rate` a second. `fresh`: none began before. `traces`: folder of Mooncake's."""
    kind, size = load.kind, count or load.requests
    if isinstance(kind, Trace):
        before, found = from_trace(read_trace(f"{traces}/{kind.file}"), count=size)
        return [shrunk(one, kind) for one in before], [shrunk(one, kind) for one in found]
    return _made(kind, size, rate, fresh)


def shrunk(request: PlannedRequest, by: Trace) -> PlannedRequest:
    """An answer is as long in the prompts behind it."""
    blocks = tuple(
        (token, max(1, round(size * (by.answers if token == TOKEN else by.prompts)))) for token, size in request.blocks
    )
    return replace(request, blocks=blocks, output_len=max(1, round(request.output_len * by.answers)))


def _made(kind: Talk | Rag | Burst, size: int, rate: float, fresh: bool) -> Requests:
    rng = random.Random(SEED)
    own = count(FIRST_OWN)
    if isinstance(kind, Talk):
        return _talks(kind, size, rate, rng, own, fresh)
    make: Callable[[], PlannedRequest] = (
        (lambda: _question(kind, rng, own)) if isinstance(kind, Rag) else (lambda: _alone(kind, rng, own))
    )
    at_once, at, found = kind.at_once if isinstance(kind, Burst) else 1, 0.0, list[PlannedRequest]()
    for number in range(2 * size):
        found.append(replace(make(), at=at))
        if number % at_once == at_once - 1:
            at += rng.expovariate(1 / at_once)
    return split(_from_zero(found, size), size)


def _alone(kind: Burst, rng: random.Random, own: "count[int]") -> PlannedRequest:
    return PlannedRequest(at=0, blocks=((next(own), rng.randint(*kind.prompt)),), output_len=rng.randint(*kind.answer))


def _question(kind: Rag, rng: random.Random, own: "count[int]") -> PlannedRequest:
    """Document n is read as often as 1 / n (about)."""
    documents = {int(kind.num ** rng.random()) for _ in range(rng.randint(*kind.documents))}
    blocks = [(FIRST_BLOCK, kind.shared), *((FIRST_BLOCK + one, kind.size) for one in sorted(documents))]
    return PlannedRequest(
        at=0, blocks=(*blocks, (next(own), rng.randint(*kind.question))), output_len=rng.randint(*kind.answer)
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    at_s: float
    talk: int
    number: int
    blocks: Blocks
    output_len: int


def _talks(kind: Talk, size: int, rate: float, rng: random.Random, own: "count[int]", fresh: bool) -> Requests:
    """A window of conversations at `rate` turns a second; of those that began before it, the last turn there is history."""
    mean = sum(kind.turns) / 2
    warm_s = 0.0 if fresh else kind.turns[1] * kind.gap_s
    turns, begin_s, talk = list[_Turn](), 0.0, 0
    while begin_s < warm_s + 1.5 * size / rate:
        turns += _talk(kind, talk, begin_s, rng, own)
        begin_s, talk = begin_s + rng.expovariate(rate / mean), talk + 1
    turns.sort(key=lambda turn: turn.at_s)
    first = next(i for i, turn in enumerate(turns) if turn.at_s >= warm_s)
    run = turns[first : first + size]
    talks = {turn.talk for turn in run}
    before = [turn for turn in {turn.talk: turn for turn in turns[:first]}.values() if turn.talk in talks]
    place = {(turn.talk, turn.number): i for i, turn in enumerate([*before, *run])}
    found = [
        PlannedRequest(
            at=turn.at_s, blocks=turn.blocks, output_len=turn.output_len, after=place.get((turn.talk, turn.number - 1))
        )
        for turn in (*before, *run)
    ]
    return split(_from_zero(found, len(before)), len(before))


def _talk(kind: Talk, talk: int, at_s: float, rng: random.Random, own: "count[int]") -> list[_Turn]:
    found, blocks = list[_Turn](), ((FIRST_BLOCK + talk % kind.groups, kind.shared),)
    for number in range(rng.randint(*kind.turns)):
        said = rng.randint(*(kind.later if number else kind.first))
        turn = _Turn(at_s, talk, number, (*blocks, (next(own), said)), rng.randint(*kind.answer))
        found.append(turn)
        blocks = PlannedRequest(at=0, blocks=turn.blocks, output_len=turn.output_len).answered
        at_s += rng.expovariate(1 / kind.gap_s)
    return found


def _from_zero(requests: Sequence[PlannedRequest], begin: int) -> list[PlannedRequest]:
    """The first request of the run comes at 0, the others a mean gap of 1 apart."""
    zero = requests[begin].at
    gap = (requests[-1].at - zero) / (len(requests) - begin - 1)
    return [replace(one, at=(one.at - zero) / gap) for one in requests]
