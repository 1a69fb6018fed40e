"""What a rank keeps of requests, and which part of the model's that is."""

from dataclasses import dataclass

from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import StatePool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPools:
    """`states`: of recurrent layers. `windows`: of layers with a window that have a pool of their own."""

    kv: KVPool
    held: HeldKV
    states: StatePool | None = None
    windows: KVPool | None = None
