"""Connections of one machine in a group, after the rendezvous."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from disagg.node_control import Control
from engine.flags.nodes import ENGINE, PLAN, Wire
from engine.parallel.region_plan import RegionPlan


@dataclass(frozen=True)
class Met:
    """Controls by node, and connections of this machine's ranks.

    `host`: our address for the others; node 0's is in its flags.
    """

    controls: Mapping[int, Control]
    region: RegionPlan
    wires: Mapping[Wire, socket.socket]
    host: str | None = None

    def of_rank(self, rank: int) -> dict[str, socket.socket]:
        mine = ((wire, sock) for wire, sock in self.wires.items() if not wire.is_the_leaders)
        return {wire.end_of(rank): sock for wire, sock in mine if rank in (wire.first, wire.second)}

    def plan_of(self, rank: int) -> socket.socket:
        return self._of_leader(PLAN, rank)

    def engine_of(self, rank: int) -> socket.socket:
        return self._of_leader(ENGINE, rank)

    def _of_leader(self, kind: str, rank: int) -> socket.socket:
        return next(sock for wire, sock in self.wires.items() if (wire.kind, wire.second) == (kind, rank))
