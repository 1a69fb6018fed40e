"""Memory pools of a rank, with their part of the model's."""

from dataclasses import dataclass

from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import StatePool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPools:
    kv: KVPool
    held: HeldKV
    states: StatePool | None = None
    windows: KVPool | None = None
