"""Engine and memory of a worker's transfers, which its managers share."""

from collections.abc import Callable

from disagg.assembly import RoleAssembly, Transfers, TransferWire
from disagg.config import SchedulerSpec
from disagg.metadata import Checksum, MetadataBuffers
from disagg.transfer_engine import engine_of, memory_of, side_pools, transfer_config
from engine.assembly.parts import EngineParts
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.ranks.group import Group
from engine.ranks.rank_checksum import GroupChecksum, RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from service.kv_layout import write_layout
from transfer_backends.contract import KVArgs
from transfer_backends.engines.rank_engines import RankEngines
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.engines.remote import RemoteEngine
from transfer_backends.wire import layout_of


def transfers_of(
    spec: SchedulerSpec, parts: EngineParts, *, num_rows: int, num_managers: int, wakeup: Callable[[], None]
) -> Transfers:
    """`num_rows`: of metadata.

    Raises ConfigError, BackendUnavailable, and EngineError if a follower's engine does not start.
    """
    config, pools = transfer_config(spec), _pools(parts)
    parts.weights.number()  # now: no hand-over should read files
    checksum = _checksum(parts, wakeup) if spec.disagg.disaggregation_kv_checksum else None
    metadata = MetadataBuffers(num_rows, weights=parts.weights.number, checksum=checksum)
    own, remotes, memory = engine_of(spec, parts.pool), _remotes(parts.group), memory_of(pools)
    dtype, kept = parts.config.dtype, parts.config.kv_cache_dtype
    args = KVArgs(
        kv=memory.kv,
        aux=metadata.region,
        signature=parts.model.signature(),
        page_size=parts.pool.page_size,
        dtype=dtype if kept == dtype else f"{dtype}, KV in {kept}",
        kv_units=parts.held.num_units,
        layer_bytes=_layer_bytes(parts),
        kv_checksum="off" if checksum is None else CHECKSUM_NAME,
        ranks=(memory, *(remote.memory for remote in remotes)),
        pools=side_pools(pools),
    )
    engines = [SharedEngine(one, num_users=num_managers) if num_managers > 1 else one for one in (own, *remotes)]
    return Transfers(
        role=RoleAssembly(
            scheduler=parts.scheduler,
            metadata=metadata,
            page_size=args.page_size,
            page_bytes=sum(args.layer_bytes) * args.kv_units,
            moves_bytes=spec.disagg.disaggregation_transfer_backend != "fake",
            layout=write_layout(layout_of(args, backend=own.caps.name)),
        ),
        engine=RankEngines(engines) if remotes else engines[0],
        args=args,
        config=config,
        followers=tuple(remote.mark for remote in remotes),
        wire=TransferWire(wakeup=wakeup),
        is_apart=spec.engine.nnodes > 1,
    )


def _checksum(parts: EngineParts, wakeup: Callable[[], None]) -> Checksum:
    own = RankChecksum(_pools(parts), wakeup=wakeup)
    return alone(own) if parts.group is None else GroupChecksum(own, parts.group.followers)


def _pools(parts: EngineParts) -> RankPools:
    return RankPools(kv=parts.pool, held=parts.held, states=parts.device.states, windows=parts.device.windows)


def _remotes(group: Group | None) -> list[RemoteEngine]:
    if group is None:
        return []
    return [
        RemoteEngine(sock, name=group.links.name_of(rank), timeout_s=group.timeout_s)
        for rank, sock in sorted(group.transfers.items())
    ]


def _layer_bytes(parts: EngineParts) -> tuple[int, ...]:
    """Bytes by layer, without recurrent layers and window layers with another pool; with windows
    only, a unit is one piece. A drafter adds one layer.
    """
    pool = parts.pool
    if not pool.specs:
        return (pool.unit_bytes,)
    own = {spec.bytes_per_token() * pool.page_size // pool.units for spec in pool.specs}
    assert len(own) == 1, own
    if parts.device.windows is not None:
        return tuple(own) * len(pool.specs)
    if pool.drafter is None:
        return tuple(own) * parts.held.num_layers
    layers = tuple(own) * pool.num_layers
    return (*layers, pool.unit_end - sum(layers))
