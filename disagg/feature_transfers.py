"""Assembly of image feature transfers: memory of both sides, and an encoder worker's role."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from disagg.assembly import RoleAssembly, Transfers, TransferWire
from disagg.config import SchedulerSpec
from disagg.features.feature_fetching import MAX_FETCHES, FeatureFetches
from disagg.features.feature_serving import EncodeRole
from disagg.features.recompute import Bounds
from disagg.metadata import MetadataBuffers
from disagg.transfer_engine import engine_of, memory_of, transfer_config
from engine.assembly.encoder import EncoderParts
from engine.assembly.parts import EngineParts, WorkerParts
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.model_files.model_config import ModelConfig
from engine.ranks.rank_checksum import RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from transfer_backends.contract import KVArgs

FETCH_TIMEOUT_S = 10.0  # per image: encoding it here takes less, and a prompt waits
HANDSHAKE_S = 3.0  # maximum for an encode worker: a prompt waits, and can do without


def encode_role(spec: SchedulerSpec, parts: EncoderParts, *, wakeup: Callable[[], None]) -> EncodeRole:
    """Raises BackendUnavailable. Transfer threads call `wakeup` when a queue may move."""
    num_rows = 2 * parts.scheduler.limits.max_running_requests
    return _transfers(spec, parts, parts.pool, num_rows=num_rows, wakeup=wakeup).encode(bounds_of(parts))


def bounds_of(parts: WorkerParts) -> Bounds:
    """The limits of requests from peers."""
    assert parts.config.context_length is not None, "resolved"
    model = parts.model
    return Bounds(vocab_size=model.vocab_size, context_length=parts.config.context_length, vision=model.vision)


def feature_fetches(
    spec: SchedulerSpec, parts: EngineParts, pool: KVPool, *, wakeup: Callable[[], None]
) -> FeatureFetches:
    """Raises BackendUnavailable."""
    transfers = _transfers(spec, parts, pool, num_rows=MAX_FETCHES, wakeup=wakeup)
    allocator = PageAllocator(num_pages=pool.num_pages, page_size=pool.page_size)
    config = replace(transfers.config, handshake_timeout_s=HANDSHAKE_S)
    return replace(transfers, config=config).features(allocator, timeout_s=FETCH_TIMEOUT_S)


def _transfers(
    spec: SchedulerSpec, parts: EngineParts | EncoderParts, pool: KVPool, *, num_rows: int, wakeup: Callable[[], None]
) -> Transfers:
    """Raises BackendUnavailable."""
    parts.weights.number()  # now: no transfer should read files
    memory = RankPools(kv=pool, held=pool.held)
    checksum = alone(RankChecksum(memory, wakeup=wakeup)) if spec.disagg.disaggregation_kv_checksum else None
    metadata = MetadataBuffers(num_rows, weights=parts.weights.number, checksum=checksum)
    return Transfers(
        role=RoleAssembly(
            scheduler=parts.scheduler, metadata=metadata, page_size=pool.page_size, page_bytes=pool.page_bytes
        ),
        engine=engine_of(spec, pool),
        args=KVArgs(
            kv=memory_of(memory).kv,
            aux=metadata.region,
            signature=feature_signature(parts.model),
            page_size=pool.page_size,
            dtype=parts.config.dtype,
            kv_checksum="off" if checksum is None else CHECKSUM_NAME,
        ),
        config=transfer_config(spec),
        wire=TransferWire(wakeup=wakeup),
    )


def feature_signature(model: ModelConfig) -> str:
    """Weights are compared separately."""
    digest = hashlib.sha256(repr(model.vision).encode()).hexdigest()[:16]
    return f"features of images for {model.architecture}, {model.hidden_size} a level, tower {digest}"
