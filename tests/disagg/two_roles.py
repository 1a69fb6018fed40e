"""A prefill and a decode engine under their production roles, joined by the test's wire, in one thread."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from disagg.assembly import RoleAssembly
from disagg.decode_role import DecodeRole
from disagg.features.feature_serving import EncodeRole
from disagg.features.recompute import Bounds
from disagg.metadata import MetadataBuffers
from disagg.prefill_role import PrefillRole
from disagg.role import PartedRole, PeerPart
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.messages import Bootstrap, FinishReason, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest, new_request
from tests.core.hash_model import VOCAB
from tests.core.named_stops import stops_of
from tests.disagg.wire_in_a_test import Ends, Wire


class RoleEngine(EngineInATest):
    """An engine under a role instead of alone."""

    role: PrefillRole | DecodeRole | EncodeRole | PartedRole

    def submit(
        self, rid: str, prompt: list[int], room: int | None, *, new: int, prefill_only: bool, **wishes: object
    ) -> None:
        """`room`: None: served whole. `wishes`: other fields of the request; sampling as a whole where it is not only greedy."""
        values: dict[str, Any] = {"sampling": SamplingParams(max_new_tokens=new), "eos_ids": frozenset(), **wishes}
        request = new_request(
            rid=rid,
            input_ids=prompt,
            arrived_s=self.now_s,
            bootstrap=None if room is None else Bootstrap("127.0.0.1", 1, room),
            prefill_only=prefill_only,
            stops=stops_of(values["sampling"]),
            **values,
        )
        self.say(self.role.add(request, self.now_s))

    def abort(self, rid: str) -> None:
        self.say(self.role.abort(rid, self.now_s))

    def turn(self) -> bool:
        self.say(self.role.poll(self.now_s))
        return super().turn()

    def launch(self, plan: Plan) -> None:
        self.role.on_launch(plan, self.now_s)
        super().launch(plan)

    def check(self) -> None:
        super().check()
        self.role.check()

    def on_step(self, effects: StepEffects) -> None:
        self.role.on_step(effects, self.now_s)
        self.say(effects.outputs)
        for rid in effects.lost:
            reason = FinishReason(kind="abort", message=effects.failure, status=503)
            self.say(self.role.abort(rid, self.now_s, reason))


BOUNDS = Bounds(vocab_size=VOCAB, context_length=10_000)
NEVER_S = 1000.0


def assembly_of(engine: RoleEngine, rows: MetadataBuffers, *, page_bytes: int = 1) -> RoleAssembly:
    page_size = engine.scheduler.limits.page_size
    return RoleAssembly(scheduler=engine.scheduler, metadata=rows, page_size=page_size, page_bytes=page_bytes)


Part = TypeVar("Part", bound=PeerPart)


def part_of(role: PartedRole, kind: type[Part]) -> Part:
    (part,) = (part for part in role.parts if isinstance(part, kind))
    return part


class Engines(ABC):
    """Engines joined by wires: what happens next is drawn."""

    @property
    @abstractmethod
    def engines(self) -> Sequence[RoleEngine]: ...

    @property
    @abstractmethod
    def wires(self) -> Sequence[Wire]: ...

    def step(self, rng: random.Random) -> bool:
        """An event of a wire, and a turn of an engine; whether anything happened."""
        moved = rng.random() < 0.7 and bool(events := [event for wire in self.wires for event in wire.events()])
        if moved:
            rng.choice(events).popleft()()
        worked = self.engines[int(rng.random() * len(self.engines))].turn()
        return moved or worked

    def run(self, rng: random.Random, most: int = 30_000) -> None:
        """Until nothing is left anywhere."""
        for _ in range(most):
            if not self.step(rng) and self.at_rest():
                return
        raise AssertionError(f"no rest: {[engine.role.queues() for engine in self.engines]}")

    def at_rest(self) -> bool:
        busy = any(e.role.waits_for_outside() or e.launched or not e.scheduler.idle for e in self.engines)
        return not busy and not any(wire.events() for wire in self.wires)

    def assert_all_back(self) -> None:
        for engine in self.engines:
            memory = engine.scheduler.memory
            for allocator in memory.allocators:
                counts = allocator.counts()
                assert not counts["held"] and not counts["quarantined"], f"{allocator} is left with {counts}"
            assert memory.cache.num_evictable == memory.cache.num_pages, "something is locked"
            engine.scheduler.check()
            engine.role.check()


class Cluster(Engines):
    """`weights`: a number for those of prefill and of decode. `handover`: what the prefill role is given. `both`: what both engines are given; `prefill`, `decode`: one alone."""

    def __init__(
        self,
        *,
        pages: tuple[int, int],
        page_size: int = 4,
        depth: int = 1,
        rows: int = 3,
        weights: tuple[int, int] = (1, 1),
        handover: Mapping[str, Any] = MappingProxyType({}),
        both: Mapping[str, object] = MappingProxyType({}),
        prefill: Mapping[str, object] = MappingProxyType({}),
        **decode: object,
    ) -> None:
        make = {"page_size": page_size, "chunk": 8, "depth": depth, "max_running": 4, **both}
        self.prefill = RoleEngine(num_pages=pages[0], **{**make, **prefill})  # type: ignore[arg-type]
        self.decode = RoleEngine(num_pages=pages[1], **{**make, **decode})  # type: ignore[arg-type]
        rows_p, rows_d = (MetadataBuffers(rows, weights=partial(int, number)) for number in weights)
        self.wire = Wire(prefill=self.prefill.model, decode=self.decode.model, rows=(rows_p, rows_d))
        ends = Ends.of(self.wire)
        self.prefill.role = assembly_of(self.prefill, rows_p).prefill(ends, ends, bounds=BOUNDS, **handover)
        self.decode.role = assembly_of(self.decode, rows_d).decode(ends, prealloc_timeout_s=NEVER_S)

    def submit(self, rid: str, prompt: list[int], room: int, *, new: int, **wishes: object) -> None:
        """To both, as the router does. `wishes`: other fields of the request."""
        self.prefill.submit(rid, prompt, room, new=new, prefill_only=True, **wishes)
        self.decode.submit(rid, prompt, room, new=new, prefill_only=False, **wishes)

    def submit_whole(self, rid: str, prompt: list[int], *, to: str, new: int, **wishes: object) -> None:
        """To one worker alone, `to` "prefill" or "decode"."""
        getattr(self, to).submit(rid, prompt, None, new=new, prefill_only=False, **wishes)

    def turn(self, rng: random.Random) -> None:
        """An event of the wire, then a turn of each engine."""
        self.wire.step(rng)
        self.prefill.turn()
        self.decode.turn()

    @property
    def engines(self) -> Sequence[RoleEngine]:
        return self.prefill, self.decode

    @property
    def wires(self) -> Sequence[Wire]:
        return (self.wire,)


def crowded(
    *,
    depth: int = 1,
    page_size: int = 4,
    resume_elsewhere: bool = True,
    namespaces: Sequence[tuple[str, ...]] = ((),),
    **decode: object,
) -> tuple[Cluster, dict[str, list[int]]]:
    """Six requests, of `namespaces` in turn, and memory for the growth of two; none is reserved."""
    pages = (200, 64 // page_size)
    decode |= {"conservativeness": 0.0, "resume_elsewhere": resume_elsewhere}
    cluster = Cluster(pages=pages, page_size=page_size, depth=depth, **decode)
    prompts = {f"r{i}": [i, *range(8 + i)] for i in range(6)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.submit(rid, prompt, i + 1, new=24, namespace=namespaces[i % len(namespaces)])
    return cluster, prompts


def run_retracted_first(cluster: Cluster) -> None:
    """While a retracted request waits for memory nobody new gets any; some do wait."""
    rng, decode, waited = random.Random(7), cluster.decode, 0
    while not cluster.at_rest():
        cluster.wire.step(rng)
        cluster.prefill.turn()
        before = decode.role.queues()
        decode.turn()
        if before["retracted"]:
            waited += 1
            assert decode.role.queues()["prealloc"] == before["prealloc"]
    assert waited > 0


def assert_no_output_twice(outputs: dict[str, list[TokenOutput]]) -> None:
    for said in outputs.values():
        counts = [output.completion_tokens for output in said if output.new_ids]
        assert counts == list(range(1, len(counts) + 1))
