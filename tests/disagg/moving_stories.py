"""Requests that move between two decode workers at any moment, beside aborts, faults and a lack of memory; judged by the oracle."""

from collections import Counter
from typing import Any

from hypothesis import strategies as st

from disagg.features.moving import Moves
from tests.core.proof.story import Ask
from tests.disagg.moving_roles import Trio
from tests.disagg.two_role_stories import GRID, Play, TwoRoleStory, stories
from tests.disagg.two_roles import part_of


def moving_stories() -> st.SearchStrategy[TwoRoleStory]:
    """`faults`: in which hand-overs between decode workers fail."""
    capacity, slots = st.sampled_from(range(48, 80)), st.sampled_from([3, 8])
    return stories(
        "abort",
        capacity=st.tuples(st.sampled_from(range(64, 120)), capacity, capacity),
        depth=st.sampled_from([1, 2, 3]),
        moves=st.sampled_from([0.03, 0.1, 0.2]),
        faults=st.sampled_from([0.0, 0.0, 0.03]),
        failing=st.sampled_from([0.0, 0.0, 0.0, 0.03]),
        stages=st.sampled_from([(1, 1), (1, 1), (1, 2)]),
        state_slots=st.one_of(st.just((0, 0)), st.tuples(slots, slots)),
        window=st.sampled_from([0, 0, 1, 5, 11]),
    )


class _Play(Play):
    def __init__(self, story: TwoRoleStory) -> None:
        size, (_, stages) = story.page_size, story.stages
        self.trio = Trio(
            pages=tuple(count // size for count in story.capacity),  # type: ignore[arg-type]
            page_size=size,
            chunk=max(2 * size, GRID if any(story.state_slots) else 0),
            depth=story.depth + stages - 1,
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
                "pp_size": stages,
                "peers_write": True,
                "backup_pages": 0 if story.resume_elsewhere else story.backup_pages,
                "resume_elsewhere": story.resume_elsewhere,
                "state_slots": story.state_slots[1],
            },
        )
        super().__init__(story, self.trio.engines)
        self.aborted: set[str] = set()

    def _abort(self, kind: str, rid: str) -> None:
        self.aborted.add(rid)
        self.trio.abort(rid)

    def go(self) -> None:
        self.trio.step(self.rng)
        if self.trio.asks and self.rng.random() < self.story.moves:
            self.trio.move(self.rng.choice([*self.trio.asks]))
            self.trio.relay()
        if self.rng.random() < self.story.faults:
            self._cut()

    def _cut(self) -> None:
        """One hand-over between decode workers fails, from either side."""
        for name in ("a", "b"):
            role = self.trio.by_name[name].role
            for handover in list(role.incoming.transfers.values()):  # type: ignore[union-attr]
                if handover.request.message.source is not None and self.rng.random() < 0.5:
                    handover.receiver.abort("a fault of the test")  # type: ignore[union-attr]
            for sent in part_of(role, Moves)._outgoing.handovers.values():
                if self.rng.random() < 0.5:
                    sent.sender.abort("a fault of the test")

    def _submit(self, rid: str, ask: Ask, **wishes: Any) -> None:
        whole = len(self.right) % 3 == self.story.seed % 3
        self.trio.submit(
            rid, ask.prompt, new=0, at="ab"[len(self.right) % 2], whole=whole, grammar=ask.grammar, **wishes
        )

    def judge(self) -> None:
        self.trio.assert_all_back()
        for rid in self.right:
            ask = self.trio.asks[rid]
            assert ask.finish is not None
            cut = ask.finish.kind == "abort"
            assert not cut or rid in self.aborted or self.story.failing or ask.finish.status, ask.finish
            self.assert_right(rid, ask.tokens, ask.finish, ask.logprobs)


def play(story: TwoRoleStory) -> Counter[str]:
    it = _Play(story)
    for event in story.events:
        it.tell(event)
    for _ in range(300):
        it.go()
    it.trio.run(it.rng)
    it.judge()
    decodes = [it.trio.by_name[name] for name in ("a", "b")]
    engines = it.trio.engines
    return Counter(
        stories=1,
        requests=len(it.right),
        steps=sum(e.scheduler.counters.steps for e in engines),
        moved=it.trio.moved,
        whole_moved=sum(ask.whole and ask.by_kv for ask in it.trio.asks.values()),
        fell_back=it.trio.fell_back,
        moved_in=sum(int(e.role.counters().get("moved_in", 0)) for e in decodes),
        retractions=sum(e.scheduler.counters.retractions for e in decodes),
        states=sum(wire.num_states for pair, wire in it.trio.wire_of.items() if pair[0] != "p"),
        windows=sum(wire.num_windows for pair, wire in it.trio.wire_of.items() if pair[0] != "p"),
        ends=sum(ask.finish.kind != "abort" for ask in it.trio.asks.values() if ask.finish is not None),
    )
