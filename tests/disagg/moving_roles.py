"""A prefill engine and two decode engines under production roles; what a router does when a request moves is done by the test."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from disagg.metadata import MetadataBuffers
from engine.messages import MOVED, FinishReason, KVSource, TokenOutput
from tests.disagg.two_roles import BOUNDS, NEVER_S, Engines, RoleEngine, assembly_of
from tests.disagg.wire_in_a_test import Ends, Wire
from tests.grammar.fixed import cycle

NAMES = ("p", "a", "b")
PATIENCE = 60  # steps in which nothing happens


@dataclass
class Ask:
    """A client's request, and what it has of the answer. `at`: the engine that decodes; `whole`: it computes the prompt, too."""

    rid: str
    prompt: list[int]
    new: int
    wishes: dict[str, object]
    grammar: tuple[int, int] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    at: str = "a"
    whole: bool = False
    hop: int = 0
    by_kv: bool = False
    read: int = 0  # outputs of this hop

    @property
    def name(self) -> str:
        return f"{self.rid}.{self.hop}"


class Trio(Engines):
    """`both`: what all three engines are given; `rows`: metadata rows of each. `targets`: to which wires lead."""

    targets: Sequence[str] = ("a", "b")

    def __init__(
        self,
        *,
        pages: tuple[int, int, int],
        page_size: int = 4,
        chunk: int = 8,
        depth: int = 1,
        rows: int = 4,
        both: Mapping[str, object] = MappingProxyType({}),
        decode: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        make = {"page_size": page_size, "chunk": chunk, "depth": depth, "max_running": 6, **both}
        self.by_name = {
            name: RoleEngine(num_pages=count, **{**make, **({} if name == "p" else decode)})  # type: ignore[arg-type]
            for name, count in zip(NAMES, pages, strict=True)
        }
        metadata = {name: MetadataBuffers(rows) for name in NAMES}
        self.wire_of = {
            (one, two): Wire(
                prefill=self.by_name[one].model, decode=self.by_name[two].model, rows=(metadata[one], metadata[two])
            )
            for one in NAMES
            for two in self.targets
            if one != two
        }
        self._add_prefill_role(metadata["p"])
        for me, other in (("a", "b"), ("b", "a")):
            self._add_decode_role(me, other, metadata[me])
        self.asks: dict[str, Ask] = {}
        self._at: dict[int, str] = {}  # where a room's request decodes
        self._rooms = 0
        self.moved = self.fell_back = self._idle = 0

    def _add_prefill_role(self, rows: MetadataBuffers) -> None:
        prefill = self.by_name["p"]
        wires = [self.wire_of["p", "a"], self.wire_of["p", "b"]]
        ends = Ends(lambda room: self.wire_of["p", self._at[room]], asked=wires)
        prefill.role = assembly_of(prefill, rows).prefill(ends, ends, bounds=BOUNDS)

    def _add_decode_role(self, me: str, other: str, rows: MetadataBuffers) -> None:
        engine, role = self.by_name[me], assembly_of(self.by_name[me], rows)
        moves = role.moves(Ends(lambda room: self.wire_of[me, other]), KVSource(me, me))
        gets = Ends(None, lambda control: self.wire_of[control or "p", me])
        engine.role = role.decode(gets, moves, prealloc_timeout_s=NEVER_S)

    # ---- what clients and the router do

    def submit(
        self, rid: str, prompt: list[int], *, new: int, at: str = "a", whole: bool = False, **wishes: object
    ) -> Ask:
        grammar = wishes.pop("grammar", None)
        ask = self.asks[rid] = Ask(rid, prompt, new, wishes, grammar=grammar, at=at, whole=whole)  # type: ignore[arg-type]
        self._place(ask, at)
        return ask

    def move(self, rid: str) -> None:
        ask = self.asks[rid]
        if ask.finish is None and ask.read and "room" not in ask.wishes:
            self._rooms += 1
            ask.wishes["room"] = self._rooms
            engine = self.by_name[ask.at]
            engine.say(engine.role.move_out(ask.name, self._rooms, engine.now_s))

    def abort(self, rid: str) -> None:
        ask = self.asks[rid]
        for engine in self.engines:
            engine.abort(ask.name)

    def _place(self, ask: Ask, at: str, *, source: KVSource | None = None, room: int | None = None) -> None:
        """By a pair, by `at` alone, or by the KV at `source`."""
        alone = ask.whole and source is None
        if room is None and not alone:
            self._rooms += 1
            room = self._rooms
        ask.at, ask.by_kv, ask.read = at, source is not None, 0
        ask.wishes.pop("room", None)  # of an order that came too late
        if room is not None:
            self._at[room] = at
        if source is None and not alone:
            self._add("p", ask, room, None)
        self._add(at, ask, room, source)

    def _add(self, name: str, ask: Ask, room: int | None, source: KVSource | None) -> None:
        engine, wishes = self.by_name[name], {k: v for k, v in ask.wishes.items() if k != "room"}
        grammar = None if ask.grammar is None else cycle(*ask.grammar)
        for token in ask.tokens if grammar is not None else ():
            assert grammar is not None and grammar.accept(token)
        resumed = {"output_ids": list(ask.tokens), "source": source, "grammar": grammar}
        engine.submit(ask.name, ask.prompt, room, new=ask.new, prefill_only=name == "p", **resumed, **wishes)

    def relay(self) -> None:
        """Give clients what has come, and place the rest of what has moved or could not move."""
        for ask in self.asks.values():
            said = self.by_name[ask.at].outputs.get(ask.name, [])
            for output in said[ask.read :]:
                ask.read += 1
                self._on_output(ask, output)
                if ask.read == 0:  # it goes on elsewhere
                    break

    def _on_output(self, ask: Ask, output: TokenOutput) -> None:
        assert output.completion_tokens in (0, len(ask.tokens) + len(output.new_ids)), "a token is lost or twice there"
        ask.tokens += output.new_ids
        ask.logprobs += [entry.logprob for entry in output.logprobs if entry.logprob is not None]
        finish = output.finish
        if finish is None:
            return
        other = "b" if ask.at == "a" else "a"
        if finish.kind == MOVED:
            room = ask.wishes.pop("room", None)
            ask.hop += 1
            self.moved += output.source is not None
            self._place(ask, other, source=output.source, room=room if output.source is not None else None)  # type: ignore[arg-type]
        elif finish.kind == "abort" and finish.status >= 500 and ask.by_kv:
            ask.hop += 1
            self.fell_back += 1
            self._place(ask, other)
        else:
            ask.finish = finish

    # ---- time

    def step(self, rng: random.Random) -> bool:
        worked = super().step(rng)
        self.relay()
        self._idle = 0 if worked else self._idle + 1
        if self._idle > PATIENCE:
            self._idle = 0
            self._lose_patience()
        return worked

    def _lose_patience(self) -> None:
        """Two that change places wait for each other's memory: the router does not wait for long."""
        for ask in self.asks.values():
            if ask.by_kv and not ask.read:
                self.by_name[ask.at].abort(ask.name)
                ask.hop += 1
                self.fell_back += 1
                self._place(ask, ask.at)

    def at_rest(self) -> bool:
        return super().at_rest() and all(ask.finish is not None for ask in self.asks.values())

    @property
    def engines(self) -> Sequence[RoleEngine]:
        return [*self.by_name.values()]

    @property
    def wires(self) -> Sequence[Wire]:
        return [*self.wire_of.values()]
