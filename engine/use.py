"""What a worker's role needs of its engine."""

from dataclasses import dataclass

from engine.kv.kv_pool import AllocateBytes, zeroed_bytes


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The defaults are those of a unified worker.

    `decodes`, `prefills`: whether such steps are recorded. `peers_write_pages`: there is no host tier, which needs writes in stream
    order. `kv_stays`: why KV memory cannot be released. `retracted_kv`: as --disaggregation-decode-retraction-backup.
    `reserve_floor`: as in Limits. `allocate_kv`: memory for the KV pool, as `zeroed_bytes`. `receives_features`: of images, which encode workers
    send: there is a pool for them.
    """

    decodes: bool = True
    prefills: bool = True
    peers_write_pages: bool = False
    kv_stays: str = ""
    retracted_kv: str = "recompute"
    reserve_floor: int = 0
    allocate_kv: AllocateBytes = zeroed_bytes
    receives_features: bool = False


UNIFIED = EngineUse()
