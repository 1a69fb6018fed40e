"""Two prefill engines and a decode engine under their production roles: one may get prefixes from the other, in one thread."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from disagg.features.prefix_fetching import PrefixFetches
from disagg.metadata import MetadataBuffers
from disagg.prefill_role import PrefillRole
from disagg.role import ManagerOfParts
from engine.messages import KVSource, PrefixSource
from tests.core.engine_in_a_test import request_of
from tests.disagg.two_roles import BOUNDS, Cluster, RoleEngine, assembly_of, part_of
from tests.disagg.wire_in_a_test import Ends, Wire

ROWS = 16


class PrefixCluster(Cluster):
    """As `Cluster`, whose prefill engine may ask `source` for prefixes, over `prefix_wire`.

    `of_source`: what that engine is given. `weights`: of source and prefill.
    """

    def __init__(
        self,
        *,
        pages: tuple[int, int, int] = (200, 200, 200),
        page_size: int = 4,
        of_source: Mapping[str, object] = MappingProxyType({}),
        weights: tuple[int, int] = (1, 1),
        **others: object,
    ) -> None:
        super().__init__(pages=pages[1:], page_size=page_size, rows=ROWS, weights=2 * weights[1:], **others)  # type: ignore[arg-type]
        made = {"page_size": page_size, "chunk": 8, "max_running": 4, **of_source}
        self.source = RoleEngine(num_pages=pages[0], **made)  # type: ignore[arg-type]
        rows = MetadataBuffers(ROWS, weights=lambda: weights[0]), MetadataBuffers(ROWS, weights=lambda: weights[1])
        self.prefix_wire = Wire(prefill=self.source.model, decode=self.prefill.model, rows=rows)
        unused = Wire(prefill=self.prefill.model, decode=self.source.model, rows=rows[::-1])
        self.gets = Ends.of(self.prefix_wire)
        self.source.role = self._role(self.source, Ends.of(self.prefix_wire), gets=Ends.of(unused), rows=rows[0])
        self.prefill.role = self._role(self.prefill, Ends.of(self.wire), gets=self.gets, rows=self.wire.rows[0])
        self.prefix_wire.rows = rows[0], self.wire.rows[0]
        self.policy = part_of(self.prefill.role, PrefixFetches)._policy

    def _role(self, engine: RoleEngine, sends: Ends, *, gets: Ends, rows: MetadataBuffers) -> PrefillRole:
        role = assembly_of(engine, rows, page_bytes=engine.scheduler.limits.page_size)  # a byte a token
        source = KVSource("127.0.0.1:1", "source")
        parts = ManagerOfParts(gets), *role.prefixes(sends, gets, source, token_bytes=1)
        return role.prefill(sends, sends, parts, bounds=BOUNDS)

    def warm(self, prompt: list[int], **wishes: object) -> None:
        """Have the source compute `prompt`."""
        request = request_of(
            prompt, rid=f"warm{self.source.scheduler.counters.requests}", max_new_tokens=1, alone=True, **wishes
        )
        self.source.say(self.source.role.add(request, 0.0))
        self.source.run()

    def ask(self, rid: str, prompt: list[int], room: int, *, known: int, new: int = 4, **wishes: object) -> None:
        """To prefill and decode, as a router does that knows that the source has `known` tokens of it."""
        named = PrefixSource("127.0.0.1:1", "source", known)
        self.prefill.submit(rid, prompt, room, new=new, prefill_only=True, prefix_source=named, **wishes)
        self.decode.submit(rid, prompt, room, new=new, prefill_only=False, **wishes)

    @property
    def engines(self) -> Sequence[RoleEngine]:
        return self.prefill, self.decode, self.source

    @property
    def wires(self) -> Sequence[Wire]:
        return self.wire, self.prefix_wire

    def counter(self, name: str) -> float:
        """A counter of the engine that asks."""
        return self.prefill.role.counters().get(name, 0)
