"""Assembly of image feature transfers: memory of both sides, and an encoder worker's role."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from disagg.assembly import RoleAssembly, source_of
from disagg.config import SchedulerSpec
from disagg.features.feature_fetching import MAX_FETCHES, FeatureFetches, rooms_of
from disagg.features.feature_serving import EncodeRole
from disagg.features.recompute import Bounds
from disagg.metadata import Checksum, MetadataBuffers
from disagg.transfer_engine import engine_of, memory_of, no_lookup, start, transfer_config
from engine.assembly.encoder import EncoderParts
from engine.assembly.parts import EngineParts, WorkerParts
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.model_files.model_config import ModelConfig
from engine.ranks.rank_checksum import RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from transfer_backends.contract import KVArgs
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.prefill.manager import PrefillManager

FETCH_TIMEOUT_S = 10.0  # per image: encoding it here takes less, and a prompt waits
HANDSHAKE_S = 3.0  # maximum for an encode worker: a prompt waits, and can do without


def encode_role(spec: SchedulerSpec, parts: EncoderParts, *, wakeup: Callable[[], None]) -> EncodeRole:
    """Raises BackendUnavailable. Transfer threads call `wakeup` when a queue may move."""
    config, scheduler = parts.config, parts.scheduler
    parts.weights.number()  # now: no transfer should read files
    metadata = MetadataBuffers(
        2 * scheduler.limits.max_running_requests,
        weights=parts.weights.number,
        checksum=feature_checksum(spec, parts.pool, wakeup),
    )
    args = feature_args(spec, parts.pool, metadata, parts.model, dtype=config.dtype)
    manager = PrefillManager(args, engine_of(spec, parts.pool), transfer_config(spec))
    start(manager, wakeup)
    role = RoleAssembly(
        scheduler=scheduler, metadata=metadata, page_size=parts.pool.page_size, page_bytes=parts.pool.page_bytes
    )
    return role.encode(manager, source_of(manager), bounds_of(parts))


def bounds_of(parts: WorkerParts) -> Bounds:
    """Return the limits of requests from peers."""
    assert parts.config.context_length is not None, "resolved"
    model = parts.model
    return Bounds(vocab_size=model.vocab_size, context_length=parts.config.context_length, vision=model.vision)


def feature_fetches(
    spec: SchedulerSpec, parts: EngineParts, pool: KVPool, *, wakeup: Callable[[], None]
) -> FeatureFetches:
    """Raises BackendUnavailable."""
    parts.weights.number()
    checksum = feature_checksum(spec, pool, wakeup)
    metadata = MetadataBuffers(MAX_FETCHES, weights=parts.weights.number, checksum=checksum)
    args = feature_args(spec, pool, metadata, parts.model, dtype=parts.config.dtype)
    config = transfer_config(spec)
    manager = DecodeManager(
        args,
        engine_of(spec, pool),
        replace(config, handshake_timeout_s=HANDSHAKE_S),
        lookup=no_lookup,
    )
    start(manager, wakeup)
    return FeatureFetches(
        memory=parts.scheduler.memory,
        manager=manager,
        metadata=metadata,
        allocator=PageAllocator(num_pages=pool.num_pages, page_size=pool.page_size),
        rooms=rooms_of(manager.incarnation),
        timeout_s=FETCH_TIMEOUT_S,
    )


def feature_args(
    spec: SchedulerSpec, pool: KVPool, metadata: MetadataBuffers, model: ModelConfig, *, dtype: str
) -> KVArgs:
    return KVArgs(
        kv=memory_of(_alone(pool)).kv,
        aux=metadata.region,
        signature=feature_signature(model),
        page_size=pool.page_size,
        dtype=dtype,
        kv_checksum=CHECKSUM_NAME if spec.disagg.disaggregation_kv_checksum else "off",
    )


def feature_signature(model: ModelConfig) -> str:
    """Return the name of a feature computation; weights are compared separately."""
    digest = hashlib.sha256(repr(model.vision).encode()).hexdigest()[:16]
    return f"features of images for {model.architecture}, {model.hidden_size} a level, tower {digest}"


def feature_checksum(spec: SchedulerSpec, pool: KVPool, wakeup: Callable[[], None]) -> Checksum | None:
    if not spec.disagg.disaggregation_kv_checksum:
        return None
    return alone(RankChecksum(_alone(pool), wakeup=wakeup))


def _alone(pool: KVPool) -> RankPools:
    return RankPools(kv=pool, held=pool.held)
