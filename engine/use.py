"""Engine requirements of worker roles."""

from dataclasses import dataclass

from engine.kv.kv_pool import AllocateBytes, zeroed_bytes


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The defaults fit a unified worker.

    `decodes`, `prefills`: record such steps. `peers_write_pages`: no host tier, which needs stream
    order. `kv_stays`: why KV memory cannot be released. `retracted_kv`: as
    --disaggregation-decode-retraction-backup. `reserve_floor`: as in Limits. `receives_features`:
    from encoder workers.
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
