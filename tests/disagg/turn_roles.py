"""Conversations at a prefill engine and two decode engines that exchange prefixes: production roles, in one thread.

What a router knows of them it reads in their KV events.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from disagg.features.prefix_fetching import FETCH_ATTEMPT
from disagg.features.prefix_serving import PrefixRequests
from disagg.metadata import MetadataBuffers
from disagg.role import ManagerOfParts
from engine.core.mem_cache.radix_cache import Branch
from engine.messages import KVSource, PrefixSource
from tests.core.announced import Announced
from tests.core.hash_model import expected_tokens
from tests.disagg.moving_roles import NAMES, Ask, Trio
from tests.disagg.two_roles import BOUNDS, NEVER_S, assembly_of
from tests.disagg.wire_in_a_test import Ends, Wire


@dataclass
class Conversation:
    """`tokens`: prompts and answers so far. `num_known`: of them, those whose KV is in the cluster for certain."""

    name: str
    tokens: list[int] = field(default_factory=list)
    num_known: int = 0
    turns: int = 0
    adapter: int = 0
    ask: Ask | None = None
    cached: list[tuple[int, int]] = field(default_factory=list)  # of each turn: found, and at least expected


class Turns(Trio):
    """A `Trio` with --prefix-fetch. Of a new turn its prefill engine learns which decode engine holds most of it."""

    targets = NAMES

    def __init__(self, *, page_size: int = 4, rows: int = 40, **given: object) -> None:
        self.page_size = page_size
        super().__init__(page_size=page_size, rows=rows, **given)  # type: ignore[arg-type]
        self.announced = {name: Announced() for name in NAMES}
        self.conversations: dict[str, Conversation] = {}

    def _add_prefill_role(self, rows: MetadataBuffers) -> None:
        role, source = assembly_of(self.by_name["p"], rows), KVSource("p", "p")
        sends = Ends(lambda room: self._out("p", room), asked=[self.wire_of["p", "a"], self.wire_of["p", "b"]])
        gets = Ends(None, lambda control: self.wire_of[control, "p"])
        parts = ManagerOfParts(gets), *role.prefixes(sends, gets, source, token_bytes=1)
        self.by_name["p"].role = role.prefill(sends, sends, parts, bounds=BOUNDS)

    def _add_decode_role(self, me: str, other: str, rows: MetadataBuffers) -> None:
        role, source = assembly_of(self.by_name[me], rows), KVSource(me, me)
        sends = Ends(lambda room: self._out(me, room), asked=[self.wire_of[me, "p"], self.wire_of[me, other]])
        gets = Ends(None, lambda control: self.wire_of[control or "p", me])
        fetches, server = role.prefixes(sends, gets, source, token_bytes=1)
        parts = *role.moves(sends, source), fetches, server, PrefixRequests(sends, server)
        self.by_name[me].role = role.decode(gets, parts, prealloc_timeout_s=NEVER_S)

    def _out(self, me: str, room: int) -> Wire:
        """Of a prefix that was asked for, else to the engine where the room's request decodes, or moves."""
        wires = {to: wire for (one, to), wire in self.wire_of.items() if one == me}
        lent = next((wire for wire in wires.values() if (room, FETCH_ATTEMPT) in wire.rooms), None)
        return lent or wires[self._at[room] if me == "p" else "b" if me == "a" else "a"]

    # ---- what clients and the router do

    def say(self, name: str, words: Sequence[int], *, new: int, at: str = "a", whole: bool = False) -> None:
        """The next turn of a conversation; `whole`: engine `at` computes it, too."""
        talk = self.conversations.setdefault(name, Conversation(name))
        assert talk.ask is None, "its last turn has not ended"
        talk.tokens += words
        talk.turns += 1
        asked: dict[str, object] = {"adapter": talk.adapter} if talk.adapter else {}
        talk.ask = self.submit(f"{name}{talk.turns}", list(talk.tokens), new=new, at=at, whole=whole, **asked)

    def _add(self, name: str, ask: Ask, room: int | None, source: KVSource | None) -> None:
        computes = name == "p" or (ask.whole and source is None)
        branch = Branch(str(ask.wishes.get("adapter") or ""))
        ask.wishes["prefix_source"] = self.holder(ask.prompt + ask.tokens, branch, like=name) if computes else None
        super()._add(name, ask, room, source)
        del ask.wishes["prefix_source"]

    def holder(self, tokens: Sequence[int], branch: Branch, *, like: str) -> PrefixSource | None:
        """The engine but `like` that holds most of it."""
        self.listen()
        others = [name for name in NAMES if name != like]
        size = self.page_size
        pages = {name: self.announced[name].num_pages(tokens, page_size=size, branch=branch) for name in others}
        best = max(pages, key=lambda name: pages[name])
        return PrefixSource(best, best, pages[best] * self.page_size) if pages[best] else None

    def listen(self) -> None:
        """Read what engines announce: at any moment all that a request finds there."""
        for name, engine in self.by_name.items():
            if events := engine.events.take():
                self.announced[name].read(events)
                self.announced[name].check(engine.scheduler.memory)

    def relay(self) -> None:
        super().relay()
        self.listen()
        for talk in self.conversations.values():
            if talk.ask is not None and talk.ask.finish is not None:
                self._end_turn(talk, talk.ask)
                talk.ask = None

    def _end_turn(self, talk: Conversation, ask: Ask) -> None:
        if ask.finish is not None and ask.finish.kind == "abort":
            self.abort(ask.rid)  # a half that was refused has another one
        assert ask.tokens == expected_tokens(ask.prompt, len(ask.tokens), adapter=talk.adapter), talk.name
        if ask.tokens:
            found = next(out.cached_tokens for out in self.outputs_of(ask) if out.new_ids)
            size = self.page_size
            talk.cached.append((found, min(talk.num_known, len(ask.prompt) - 1) // size * size))
            talk.num_known = len(talk.tokens) + len(ask.tokens) - 1
        talk.tokens += ask.tokens

    def outputs_of(self, ask: Ask):  # type: ignore[no-untyped-def]
        """Of its first hop."""
        return next(
            e.outputs[f"{ask.rid}.0"] for name, e in self.by_name.items() if name != "p" and f"{ask.rid}.0" in e.outputs
        )

    def until_said(self, rng: random.Random, *, name: str = "", most: int = 20_000) -> None:
        """Until the turn of a conversation has ended, or all."""
        for _ in range(most):
            if not any(talk.ask is not None for talk in self.conversations.values() if name in ("", talk.name)):
                return
            self.step(rng)
        raise AssertionError("a turn does not end")


# ---- stories


@dataclass(frozen=True)
class Event:
    """`kind`: "say" (a turn of conversation `n` % 3, of `words`, for `new` tokens, by one engine if `whole`), "go" (n steps),
    "move" and "abort" (its turn).
    """

    kind: str
    n: int
    words: int = 1
    new: int = 1
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class TurnStory:
    """`room`: tokens of prefill's memory, and of each decode engine's."""

    room: tuple[int, int]
    page_size: int
    depth: int
    lag: bool
    resume_elsewhere: bool
    seed: int
    events: tuple[Event, ...]

    @property
    def is_roomy(self) -> bool:
        return min(self.room) >= ROOMY


ROOMY = 2000
ADAPTERS = (0, 1000, 2000)  # of conversations


def turn_stories(*, roomy: bool) -> st.SearchStrategy[TurnStory]:
    number = st.sampled_from(range(24))
    said = st.builds(
        Event,
        st.just("say"),
        number,
        st.sampled_from([1, 2, 5, 9, 14]),
        st.sampled_from([1, 2, 13, 30]),
        st.booleans(),
    )
    event = st.builds(Event, st.sampled_from(["go", "go", "move", "move", "abort"]), number)
    return st.builds(
        TurnStory,
        room=st.just((ROOMY, ROOMY)) if roomy else st.sampled_from([(110, 76), (ROOMY, 76), (110, 90)]),
        page_size=st.sampled_from([1, 2, 4]),
        depth=st.sampled_from([1, 2, 3]),
        lag=st.booleans(),
        resume_elsewhere=st.booleans(),
        seed=st.integers(0, 2**32),
        events=st.lists(st.one_of(said, said, event, event), min_size=12, max_size=40).map(tuple),
    )


def play(story: TurnStory) -> Counter[str]:
    turns, rng = (
        Turns(
            pages=tuple(count // story.page_size for count in (story.room[0], *story.room[1:] * 2)),
            page_size=story.page_size,
            depth=story.depth,
            both={"lag": story.lag, "conservativeness": 0.0, "clip": 0, "max_loras_per_batch": 2},
            decode={"resume_elsewhere": story.resume_elsewhere},
        ),
        random.Random(story.seed),
    )
    books = [0, 0, 0]
    for event in story.events:
        which = event.n % 3
        name = f"{'cde'[which]}{books[which]}-"
        talk = turns.conversations.setdefault(name, Conversation(name, adapter=ADAPTERS[which]))
        if event.kind == "go":
            for _ in range(3 * event.n):
                turns.step(rng)
        elif event.kind == "say":
            turns.until_said(rng, name=name)
            at, words = "aaab"[event.n // 3 % 4], [(event.n + i) % 50 for i in range(event.words)]
            turns.say(name, words, new=event.new, at=at, whole=event.whole)
            books[which] += len(talk.tokens) > 20  # the next one begins anew
        elif talk.ask is not None and event.kind == "abort":
            turns.abort(talk.ask.rid)
        elif talk.ask is not None:
            for _ in range(12 * event.n):  # what has said nothing does not move
                turns.step(rng)
            if talk.ask is not None:
                turns.move(talk.ask.rid)
    turns.until_said(rng)
    turns.run(rng)
    turns.assert_all_back()
    cached = [found for talk in turns.conversations.values() for found in talk.cached]
    if story.is_roomy:
        assert all(found >= least for found, least in cached), "a token of history was computed again"
    fetched = {name: int(engine.role.counters()["prefix_fetched"]) for name, engine in turns.by_name.items()}
    return Counter(
        stories=1,
        roomy=story.is_roomy,
        turns=len(cached),
        found=sum(least > 0 for _, least in cached),
        by_prefill=fetched["p"],
        by_decode=fetched["a"] + fetched["b"],
        moved=turns.moved,
        retractions=sum(turns.by_name[name].scheduler.counters.retractions for name in "ab"),
        removed=sum(announced.num_removed for announced in turns.announced.values()),
    )
