"""Requests that move between two decode workers at any moment, beside aborts, faults and a lack of memory; judged by the oracle."""

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st

from disagg.features.moving import Moves
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from tests.core.proof.oracle import Answer, answer_of, wishes_of
from tests.core.proof.story import Ask, asks
from tests.disagg.moving_roles import Trio
from tests.disagg.two_role_stories import GRID, Event
from tests.disagg.two_roles import part_of


@dataclass(frozen=True, kw_only=True)
class MovingStory:
    """As a TwoRoleStory, with two decode workers. `moves`: share of the steps after which a request moves; `faults`: in which hand-overs
    between decode workers fail.
    """

    page_size: int
    capacity: tuple[int, int, int]
    depth: int
    lag: bool
    rows: int
    conservativeness: float
    clip: int
    backup_pages: int
    resume_elsewhere: bool
    moves: float
    faults: float
    failing: float
    stages: int
    seed: int
    events: tuple[Ask | Event, ...]
    state_slots: tuple[int, int, int]
    window: int


def moving_stories() -> st.SearchStrategy[MovingStory]:
    kinds = ["go"] * 10 + ["abort"]
    event = st.builds(Event, st.sampled_from(kinds), st.sampled_from(range(30)))
    capacity = st.sampled_from(range(48, 80))
    slots = st.sampled_from([3, 8])
    return st.builds(
        MovingStory,
        page_size=st.sampled_from([1, 2, 4]),
        capacity=st.tuples(st.sampled_from(range(64, 120)), capacity, capacity),
        depth=st.sampled_from([1, 2, 3]),
        lag=st.booleans(),
        rows=st.sampled_from([1, 3, 8]),
        conservativeness=st.sampled_from([0.0, 0.0, 1.0]),
        clip=st.sampled_from([0, 0, 4096]),
        backup_pages=st.sampled_from([0, 0, 1000]),
        resume_elsewhere=st.booleans(),
        moves=st.sampled_from([0.03, 0.1, 0.2]),
        faults=st.sampled_from([0.0, 0.0, 0.03]),
        failing=st.sampled_from([0.0, 0.0, 0.0, 0.03]),
        stages=st.sampled_from([1, 1, 2]),
        seed=st.integers(0, 2**32),
        events=st.lists(st.one_of(asks(), event, event), min_size=15, max_size=40).map(tuple),
        state_slots=st.one_of(st.just((0, 0, 0)), st.tuples(slots, slots, slots)),
        window=st.sampled_from([0, 0, 1, 5, 11]),
    )


class _Play:
    def __init__(self, story: MovingStory) -> None:
        self.story, size = story, story.page_size
        self.trio = Trio(
            pages=tuple(count // size for count in story.capacity),  # type: ignore[arg-type]
            page_size=size,
            chunk=max(2 * size, GRID if any(story.state_slots) else 0),
            depth=story.depth + story.stages - 1,
            rows=story.rows,
            both={
                "lag": story.lag,
                "conservativeness": story.conservativeness,
                "clip": story.clip,
                "grid": GRID,
                "window": story.window,
                "more_window_pages": 8,
                "state_slots": story.state_slots[0],
            },
            decode={
                "pp_size": story.stages,
                "peers_write": True,
                "backup_pages": 0 if story.resume_elsewhere else story.backup_pages,
                "resume_elsewhere": story.resume_elsewhere,
                "state_slots": story.state_slots[1],
            },
        )
        self.rng = random.Random(story.seed)
        for engine in self.trio.engines.values():
            engine.model.fails = lambda plan: bool(plan.items) and self.rng.random() < story.failing
        self.right: dict[str, tuple[Answer, bool]] = {}
        self.aborted: set[str] = set()

    def tell(self, event: Ask | Event) -> None:
        if isinstance(event, Ask):
            self._ask(event)
        elif event.kind == "go":
            for _ in range(event.n):
                self._go()
        elif self.right:
            rid = f"r{event.n % len(self.right)}"
            self.aborted.add(rid)
            self.trio.abort(rid)

    def _go(self) -> None:
        self.trio.step(self.rng)
        if self.trio.asks and self.rng.random() < self.story.moves:
            self.trio.move(self.rng.choice([*self.trio.asks]))
            self.trio.relay()
        if self.rng.random() < self.story.faults:
            self._cut()

    def _cut(self) -> None:
        """One hand-over between decode workers fails, from either side."""
        for name in ("a", "b"):
            role = self.trio.engines[name].role
            for handover in list(role.incoming.transfers.values()):  # type: ignore[union-attr]
                if handover.request.message.source is not None and self.rng.random() < 0.5:
                    handover.receiver.abort("a fault of the test")  # type: ignore[union-attr]
            for sent in part_of(role, Moves)._outgoing.handovers.values():
                if self.rng.random() < 0.5:
                    sent.sender.abort("a fault of the test")

    def _ask(self, ask: Ask) -> None:
        if ask.length == 0:
            return
        rid, wishes = f"r{len(self.right)}", wishes_of(ask, new=max(1, ask.new), gives_nan=False)
        self.right[rid] = answer_of(wishes, [0], [ask.adapter]), ask.logprob_from is not None
        self.trio.submit(
            rid,
            ask.prompt,
            new=0,
            at="ab"[len(self.right) % 2],
            sampling=SamplingParams(
                max_new_tokens=wishes.new,
                min_new_tokens=ask.min_new,
                stop=() if wishes.stop_string is None else (wishes.stop_string,),
                stop_token_ids=wishes.stop_ids,
            ),
            eos_ids=wishes.eos,
            grammar=ask.grammar,
            logprobs=None if ask.logprob_from is None else LogprobOptions(),
            keep_kv=ask.keep_kv,
            namespace=ask.namespace,
        )

    def judge(self) -> None:
        self.trio.assert_all_back()
        for rid, (right, with_logprobs) in self.right.items():
            ask = self.trio.asks[rid]
            assert ask.finish is not None
            cut = ask.finish.kind == "abort"
            assert not cut or rid in self.aborted or self.story.failing or ask.finish.status, ask.finish
            assert ask.tokens == (right.tokens[: len(ask.tokens)] if cut else right.tokens)
            assert cut or (ask.finish.kind, ask.finish.matched) == (right.why, right.matched)
            assert ask.logprobs == (right.logprobs[: len(ask.tokens)] if with_logprobs else [])


def play(story: MovingStory) -> Counter[str]:
    it = _Play(story)
    for event in story.events:
        it.tell(event)
    for _ in range(300):
        it._go()
    it.trio.run(it.rng)
    it.judge()
    decodes = [it.trio.engines[name] for name in ("a", "b")]
    engines = it.trio.engines.values()
    return Counter(
        stories=1,
        requests=len(it.right),
        steps=sum(e.scheduler.counters.steps for e in engines),
        moved=it.trio.moved,
        fell_back=it.trio.fell_back,
        moved_in=sum(int(e.role.counters().get("moved_in", 0)) for e in decodes),
        retractions=sum(e.scheduler.counters.retractions for e in decodes),
        states=sum(wire.num_states for pair, wire in it.trio.wires.items() if pair[0] != "p"),
        windows=sum(wire.num_windows for pair, wire in it.trio.wires.items() if pair[0] != "p"),
        ends=sum(ask.finish.kind != "abort" for ask in it.trio.asks.values() if ask.finish is not None),
    )
