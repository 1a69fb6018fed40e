"""Requests that cross both roles with aborts on either side at any moment, drawn by hypothesis and judged by the oracle."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from engine.core.policy import NO_PRIORITIES, Priorities
from engine.messages import FinishReason, LogprobOptions
from engine.sampling_params import SamplingParams
from tests.core.proof.oracle import Answer, answer_of, wishes_of
from tests.core.proof.story import PRIORITIES, Ask, asks, branches, spread_among
from tests.disagg.two_roles import Cluster, RoleEngine
from tests.grammar.fixed import cycle

GRID = 8  # where prompts of a model with recurrent states may be cut


@dataclass(frozen=True)
class Event:
    """`kind`: "go" (n moves of wire or engines, by lot), "abort-prefill", "abort-decode", "abort-both" (request n)."""

    kind: str
    n: int


@dataclass(frozen=True, kw_only=True)
class TwoRoleStory:
    """`rows`: metadata rows of each side. `faults`: share of moves in which handshakes, or recomputes under way, fail. `failing`: of
    steps, those that find no memory. `stages`: of each side's pipeline, which is so much deeper. `places`: adapters in a step.
    `moves`: with two decode workers, the share of the steps after which a request moves between them. `whole`: share of requests that one
    worker serves whole, drawn which. `lanes`: decode multiplexes prompts and decodes.
    """

    page_size: int
    capacity: tuple[int, ...]  # of prefill, then decode
    chunk_pages: int = 2
    depth: int
    decode_depth: int = 1
    lag: bool
    mixed: bool = False
    rows: int
    backup_pages: int
    resume_elsewhere: bool
    priorities: Priorities = NO_PRIORITIES
    conservativeness: float
    clip: int
    layerwise: bool = False
    moves: float = 0.0
    whole: float = 0.0
    lanes: bool = False
    faults: float
    failing: float
    stages: tuple[int, int]
    seed: int
    events: tuple[Ask | Event, ...]
    state_slots: tuple[int, ...] = (0, 0)
    window: int = 0
    places: int = 0


def stories(*kinds: str, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[TwoRoleStory]:
    """Draws `own` fields and those that all stories draw alike; `kinds`: of events beside "go"."""
    event = st.builds(Event, st.sampled_from(["go"] * 10 + list(kinds)), st.sampled_from(range(20)))
    drawn = {
        "page_size": st.sampled_from([1, 2, 4]),
        "lag": st.booleans(),
        "rows": st.sampled_from([1, 3, 8]),
        "backup_pages": st.sampled_from([0, 8, 1000]),
        "resume_elsewhere": st.booleans(),
        "conservativeness": st.sampled_from([0.0, 0.0, 1.0]),
        "clip": st.sampled_from([0, 0, 0, 4096]),
        "seed": st.integers(0, 2**32),
        "events": st.lists(st.one_of(asks(), event, event), min_size=15, max_size=45).map(tuple),
        **own,
    }
    return st.builds(
        TwoRoleStory, **{part.name: drawn[part.name] for part in fields(TwoRoleStory) if part.name in drawn}
    )


def stories_of_lanes() -> st.SearchStrategy[TwoRoleStory]:
    """Of a decode worker with --enable-pdmux, without what that refuses."""
    own = {"lanes": True, "whole": 0.6, "backup_pages": 0, "stages": (1, 1)}
    return two_role_stories(windows=True).map(lambda story: replace(story, **own))


def two_role_stories(
    *, states: bool = False, windows: bool = False, adapters: bool = False
) -> st.SearchStrategy[TwoRoleStory]:
    """`states`: of a model with recurrent layers, of whose slots there are few. `windows`: of one with layers that see one.

    `adapters`: KV depends on them, too, and requests share it in namespaces alone.
    """
    if adapters:
        plain, places = two_role_stories(states=states, windows=windows), st.sampled_from([1, 2, 3])
        return st.builds(
            lambda story, drawn, places: replace(story, places=places, events=spread_among(drawn, story.events)),
            plain,
            branches(),
            places,
        )
    slots = st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 3, 8])) if states else st.just((0, 0))
    return stories(
        *("abort-prefill", "abort-decode", "abort-both"),
        capacity=st.tuples(st.sampled_from(range(48, 120)), st.sampled_from(range(48, 64))),
        chunk_pages=st.sampled_from([1, 2, 4]),
        depth=st.sampled_from([1, 2]),
        decode_depth=st.sampled_from([1, 2, 3]),
        mixed=st.booleans(),
        priorities=st.sampled_from([NO_PRIORITIES, *PRIORITIES]),
        layerwise=st.booleans(),
        whole=st.sampled_from([0.0, 0.3, 0.6]),
        faults=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
        failing=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3]),
        stages=st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2)]),
        state_slots=slots,
        window=st.sampled_from([1, 2, 5, 6, 11]) if windows else st.just(0),
    )


class Play(ABC):
    """Plays a story to `engines`, and knows what is right."""

    def __init__(self, story: TwoRoleStory, engines: Sequence[RoleEngine]) -> None:
        self.story, self.rng = story, random.Random(story.seed)
        for engine in engines:
            engine.model.fails = lambda plan: bool(plan.items) and self.rng.random() < story.failing
        self.right: dict[str, tuple[Answer, bool]] = {}  # what is right, and whether logprobs were asked for

    def tell(self, event: Ask | Event) -> None:
        if isinstance(event, Ask):
            if event.length:
                wishes = wishes_of(event, new=max(1, event.new), gives_nan=False)
                rid = f"r{len(self.right)}"
                self.right[rid] = answer_of(wishes, [0], [event.adapter]), event.logprob_from is not None
                sampling = SamplingParams(
                    max_new_tokens=wishes.new,
                    min_new_tokens=event.min_new,
                    stop=() if wishes.stop_string is None else (wishes.stop_string,),
                    stop_token_ids=wishes.stop_ids,
                )
                logprobs = None if event.logprob_from is None else LogprobOptions()
                beside = {"keep_kv": event.keep_kv, "namespace": event.namespace}
                self._submit(rid, event, sampling=sampling, eos_ids=wishes.eos, logprobs=logprobs, **beside)
        elif event.kind == "go":
            for _ in range(event.n):
                self.go()
        elif self.right:
            self._abort(event.kind, f"r{event.n % len(self.right)}")

    @abstractmethod
    def go(self) -> None:
        """Let something happen."""

    @abstractmethod
    def _submit(self, rid: str, ask: Ask, **wishes: Any) -> None: ...

    @abstractmethod
    def _abort(self, kind: str, rid: str) -> None: ...

    def assert_right(self, rid: str, tokens: list[int], finish: FinishReason, logprobs: list[float]) -> None:
        right, with_logprobs = self.right[rid]
        cut = finish.kind == "abort"
        assert tokens == (right.tokens[: len(tokens)] if cut else right.tokens)
        assert cut or (finish.kind, finish.matched) == (right.why, right.matched)
        assert logprobs == (right.logprobs[: len(tokens)] if with_logprobs else [])


class _Play(Play):
    def __init__(self, story: TwoRoleStory) -> None:
        size = story.page_size
        self.cluster = Cluster(
            pages=(story.capacity[0] // size, story.capacity[1] // size),
            page_size=size,
            depth=story.depth,
            rows=story.rows,
            handover={"layerwise": story.layerwise},
            both={
                "chunk": max(story.chunk_pages * size, GRID if any(story.state_slots) else 0),
                "max_loras_per_batch": story.places,
                "max_running": 8,
                "lag": story.lag,
                "mixed_chunk": story.mixed,
                "conservativeness": story.conservativeness,
                "clip": story.clip,
                "priorities": story.priorities,
                "grid": GRID,
                "window": story.window,
                "more_window_pages": 4,
            },
            prefill={"pp_size": story.stages[0], "state_slots": story.state_slots[0]},
            pp_size=story.stages[1],
            **({"multiplexed": True, "mixed_chunk": False} if story.lanes else {}),
            state_slots=story.state_slots[1],
            peers_write=True,
            backup_pages=0 if story.resume_elsewhere else story.backup_pages,
            resume_elsewhere=story.resume_elsewhere,
        )
        self.cluster.decode.depth = story.decode_depth
        for engine, stages in zip(self.engines, story.stages, strict=True):
            engine.depth += stages - 1
        super().__init__(story, self.engines)
        self.quarantined = 0
        self.alone: dict[str, RoleEngine] = {}  # those served whole, and where

    @property
    def engines(self) -> tuple[RoleEngine, RoleEngine]:
        return self.cluster.prefill, self.cluster.decode

    def _abort(self, kind: str, rid: str) -> None:
        for side in ("prefill", "decode"):
            if kind in (f"abort-{side}", "abort-both"):
                getattr(self.cluster, side).abort(rid)

    def go(self) -> None:
        cluster, faults = self.cluster, self.story.faults
        cluster.wire.unreachable = self.rng.random() < faults
        cluster.wire.step(self.rng)
        self.rng.choice(self.engines).turn()
        if self.rng.random() < faults / 10:
            for rid in [rid for rid in cluster.prefill.scheduler.stages.live if rid.startswith("recompute-")]:
                cluster.prefill.abort(rid)
        self.quarantined += self.cluster.decode.scheduler.memory.allocator.counts()["quarantined"] > 0

    def _submit(self, rid: str, ask: Ask, **wishes: Any) -> None:
        room, beside = len(self.right), {"priority": ask.priority, "adapter": ask.adapter}
        engines: Sequence[RoleEngine] = self.engines
        if whole := self.rng.random() < self.story.whole:
            engines = [self.rng.choice(engines)]
            (self.alone[rid],) = engines
        for engine in engines:
            grammar = None if ask.grammar is None else cycle(*ask.grammar)
            half = {"room": None if whole else room, "prefill_only": engine is self.cluster.prefill and not whole}
            engine.submit(rid, ask.prompt, new=0, grammar=grammar, **half, **wishes, **beside)

    def judge(self) -> None:
        self.cluster.assert_all_back()
        assert self.cluster.decode.model.copies == {}, "a copy of an ended request is left"
        prefill, decode = self.engines
        assert not any(rid.startswith("recompute-") for rid in prefill.outputs), "no client requested that"
        for rid in self.right:
            engine = self.alone.get(rid, decode)
            assert rid in engine.finish and (rid in self.alone or rid in prefill.finish)
            logprobs = [entry.logprob for output in engine.outputs[rid] for entry in output.logprobs]
            self.assert_right(rid, engine.tokens[rid], engine.finish[rid], logprobs)  # type: ignore[arg-type]
            told = [output.completion_tokens for output in engine.outputs[rid] if output.new_ids]
            assert told == list(range(1, len(told) + 1))

    def tally(self) -> Counter[str]:
        prefill, decode = self.engines
        plans = prefill.plans + decode.plans
        return Counter(f"end:{finish.kind}" for finish in decode.finish.values()) + Counter(
            stories=1,
            requests=len(self.right),
            steps=prefill.scheduler.counters.steps + decode.scheduler.counters.steps,
            failed_steps=prefill.scheduler.counters.failed_steps + decode.scheduler.counters.failed_steps,
            retractions=decode.scheduler.counters.retractions,
            retractions_at_prefill=prefill.scheduler.counters.retractions,
            whole_at_prefill=sum(engine is prefill and not is_cut(engine, rid) for rid, engine in self.alone.items()),
            whole_at_decode=sum(engine is decode and not is_cut(engine, rid) for rid, engine in self.alone.items()),
            whole_retracted=sum(
                max(output.retractions for output in engine.outputs[rid]) > 0 for rid, engine in self.alone.items()
            ),
            preemptions=decode.scheduler.counters.preemptions,
            resume_failures=int(decode.role.counters().get("recompute_failed", 0)),
            resumed_elsewhere=int(decode.role.counters().get("resumed_through_prefill", 0)),
            restored_tokens=decode.scheduler.backups.restored_tokens,
            overlapped=prefill.overlapped + decode.overlapped,
            chunks=sum(not item.sample for plan in plans for item in plan.items),
            mixed=sum(len({item.extend for item in plan.items}) == 2 for plan in plans),
            skipped=self.cluster.wire.num_skipped,
            gated=self.cluster.wire.num_gated,
            masks=sum(len(plan.masks) for plan in plans),
            quarantined=self.quarantined,
            sent_states=self.cluster.wire.num_states,
            sent_window_pages=self.cluster.wire.num_windows,
            adapters=sum(bool(ask.adapter) for ask in self.story.events if isinstance(ask, Ask)),
        )


def is_cut(engine: RoleEngine, rid: str) -> bool:
    return engine.finish[rid].kind == "abort"


def play(story: TwoRoleStory) -> Counter[str]:
    """From the first event to rest, all checked; what happened, counted."""
    it = _Play(story)
    for event in story.events:
        it.tell(event)
    it.cluster.run(it.rng)
    it.judge()
    return it.tally()
