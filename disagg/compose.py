"""Builds a worker's role from metadata buffers, transfer engine and manager."""

from collections.abc import Callable
from dataclasses import replace

from disagg.config import SchedulerSpec, read_secret
from disagg.decode_role import DecodeRole
from disagg.layerwise import StepClock, groups_of
from disagg.metadata import Checksum, MetadataBuffers
from disagg.page_sender import PageSender
from disagg.prefill_role import PrefillRole
from disagg.recompute import Bounds
from disagg.registration import RouteFinder, registrar_of
from engine.build import EngineParts
from engine.kernels.page_sums import page_sums_for
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.kv.page_checksum import PageChecksum
from engine.loop.role import EngineRole, UnifiedRole
from transfer_backends.contract import KVArgs, LayerGroup, Region, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager

LEAST_BYTES = 4 << 20  # that leave while the next chunk computes: fewer disturb it more than they hide


def make_role(spec: SchedulerSpec, parts: EngineParts, *, wakeup: Callable[[], None]) -> EngineRole:
    """`wakeup`: transfer threads call it when a queue may move."""
    if spec.disagg.disaggregation_mode == "null":
        return UnifiedRole(parts.scheduler)
    most = parts.scheduler.limits.max_running_requests
    metadata = MetadataBuffers(2 * most)  # running ones, and as many on their way
    make = _prefill if spec.disagg.disaggregation_mode == "prefill" else _decode
    return make(spec, parts, metadata, wakeup)


def _prefill(
    spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers, wakeup: Callable[[], None]
) -> PrefillRole:
    engine = _engine(spec, parts)
    groups = _layer_groups(spec, parts)
    kv_args = replace(_kv_args(spec, parts, metadata), groups=groups)
    config = _transfer_config(spec)
    manager = PrefillManager(kv_args, engine, config, layers=StepClock(parts.device.layers) if groups else None)
    manager.set_wakeup(wakeup)
    if groups:
        parts.device.layers.watch(kv_args.marks(), manager.wake_sender)
    manager.start()
    assert spec.bootstrap is not None, "the worker names a bootstrap server"
    registrar = registrar_of(
        manager,
        kv_args,
        server=spec.bootstrap,
        secret=config.secret,
        dp_size=spec.engine.dp_size,
        dp_rank=spec.dp_rank,
    )
    registrar.start()
    return PrefillRole(
        scheduler=parts.scheduler,
        manager=manager,
        pages=PageSender(
            metadata,
            page_size=parts.pool.page_size,
            page_bytes=parts.pool.page_bytes,
            checksum=_checksum(spec, parts, wakeup),
            layerwise=bool(groups),
            least_bytes=LEAST_BYTES,
        ),
        directory=registrar,
        bounds=_bounds(parts),
    )


def _decode(
    spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers, wakeup: Callable[[], None]
) -> DecodeRole:
    config = _transfer_config(spec)
    routes = RouteFinder(secret=config.secret, grace_s=spec.disagg.disaggregation_bootstrap_grace_s)
    manager = DecodeManager(
        _kv_args(spec, parts, metadata),
        _engine(spec, parts),
        config,
        lookup=routes.find,
    )
    manager.set_wakeup(wakeup)
    manager.start()
    return DecodeRole(
        scheduler=parts.scheduler,
        manager=manager,
        metadata=metadata,
        moves_bytes=spec.disagg.disaggregation_transfer_backend != "fake",
        prealloc_timeout_s=spec.disagg.disaggregation_prealloc_timeout_s,
        checksum=_checksum(spec, parts, wakeup),
    )


def _layer_groups(spec: SchedulerSpec, parts: EngineParts) -> tuple[LayerGroup, ...]:
    return groups_of(parts.pool.layer_ends(), mode=spec.disagg.disaggregation_layerwise_transfer)


def _bounds(parts: EngineParts) -> Bounds:
    assert parts.config.context_length is not None, "resolved"
    return Bounds(vocab_size=parts.model.vocab_size, context_length=parts.config.context_length)


def _checksum(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> Checksum | None:
    if not spec.disagg.disaggregation_kv_checksum:
        return None
    return PageChecksum(parts.pool, page_sums=page_sums_for(parts.pool.device), wakeup=wakeup)


def _kv_args(spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers) -> KVArgs:
    pool = parts.pool
    region = Region(pool.base_ptr, (1 + pool.num_pages) * pool.units, pool.unit_bytes, _device(parts))
    return KVArgs(
        kv=region,
        aux=metadata.region,
        signature=parts.model.signature(),
        page_size=pool.page_size,
        dtype=parts.config.dtype,
        kv_units=pool.units,
        layer_bytes=tuple(spec.bytes_per_token() * pool.page_size // pool.units for spec in pool.specs),
        kv_checksum=CHECKSUM_NAME if spec.disagg.disaggregation_kv_checksum else "off",
    )


def _device(parts: EngineParts) -> int | None:
    device = parts.pool.device
    return device.index or 0 if device.type == "cuda" else None


def _engine(spec: SchedulerSpec, parts: EngineParts) -> Engine:
    disagg = spec.disagg
    return make_engine(
        disagg.disaggregation_transfer_backend,
        host=spec.control_host,
        device=_device(parts),
        mooncake_protocol=disagg.disaggregation_mooncake_protocol,
        ib_device=disagg.disaggregation_ib_device,
        fake_delay_s=disagg.fake_transfer_delay_s,
        fake_failure_rate=disagg.fake_transfer_failure_rate,
        seed=spec.engine.random_seed or 0,
    )


def _transfer_config(spec: SchedulerSpec) -> TransferConfig:
    disagg = spec.disagg
    config = TransferConfig(
        bootstrap_timeout_s=disagg.disaggregation_bootstrap_timeout_s,
        waiting_timeout_s=disagg.disaggregation_waiting_timeout_s,
        transfer_timeout_s=disagg.disaggregation_transfer_timeout_s,
        handshake_timeout_s=disagg.disaggregation_handshake_timeout_s,
        heartbeat_interval_s=disagg.disaggregation_heartbeat_interval_s,
        heartbeat_max_failures=disagg.disaggregation_heartbeat_max_failures,
        drain_timeout_s=disagg.disaggregation_drain_timeout_s,
        control_host=spec.control_host,
    )
    return replace(config, secret=read_secret(disagg.cluster_secret_file))
