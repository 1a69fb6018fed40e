"""Assembly of a worker's role: metadata buffers, transfer engine, manager."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from disagg.config import SchedulerSpec
from disagg.decode_role import PREALLOC_TIMEOUT_S, DecodeRole
from disagg.feature_fetching import FeatureFetches, FetchingRole
from disagg.feature_transfers import feature_fetches
from disagg.layerwise import StepClock, groups_of
from disagg.metadata import Checksum, MetadataBuffers
from disagg.moving import Moves
from disagg.outgoing import PageSender
from disagg.prefill_role import PrefillRole
from disagg.prefix_exchange import MAX_SERVED, PrefixExchange, PrefixServer
from disagg.prefix_fetching import MAX_FETCHES, FetchPolicy, PrefixFetches
from disagg.registration import RouteFinder, registrar_of
from disagg.resumption import Bounds
from disagg.transfer_engine import engine_of, memory_of, no_lookup, side_pools, start, transfer_config
from engine.build import EngineParts
from engine.kv.cache_spec import UNIT_ALIGN_BYTES
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.loop.role import EngineRole, UnifiedRole
from engine.messages import KVSource
from engine.ranks.group import Group
from engine.ranks.rank_checksum import GroupChecksum, RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from service.flags import ConfigError
from transfer_backends.contract import KVArgs, LayerGroup, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.ranks.engines import RankEngines
from transfer_backends.ranks.remote import RemoteEngine

MOVE_TIMEOUT_S = (
    30.0  # for another decode worker to give pages: until then the request holds memory here and its client waits
)
PAGES_OF_WINDOWS = (
    "--prefix-fetch: layers with a window have pages of their own, which a prefix of another worker does not bring along; give "
    "--disable-hybrid-swa-memory"
)
MIN_BYTES = 4 << 20  # per send while the next chunk computes: smaller ones disturb it more than they hide


def make_role(spec: SchedulerSpec, parts: EngineParts, *, wakeup: Callable[[], None]) -> EngineRole:
    """`wakeup`: called by transfer threads when a queue may move."""
    if spec.disagg.disaggregation_mode == "null":
        features = _features(spec, parts, wakeup)
        return UnifiedRole(parts.scheduler) if features is None else FetchingRole(parts.scheduler, features)
    most = parts.scheduler.limits.max_running_requests
    parts.weights.number()  # now: no hand-over should read files
    num_rows = 2 * most  # running requests, and as many in transfer
    if spec.disagg.prefix_fetch:
        num_rows += MAX_FETCHES + MAX_SERVED
    metadata = MetadataBuffers(num_rows, weights=parts.weights.number)
    make = _prefill if spec.disagg.disaggregation_mode == "prefill" else _decode
    return make(spec, parts, metadata, wakeup)


def _prefill(
    spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers, wakeup: Callable[[], None]
) -> PrefillRole:
    fetches = spec.disagg.prefix_fetch
    if fetches and parts.device.windows is not None:
        raise ConfigError(PAGES_OF_WINDOWS)
    share = partial(SharedEngine, num_users=2) if fetches else (lambda engine: engine)
    transfers = _transfers(spec, parts, metadata, share=share)
    groups = _layer_groups(spec, transfers.args) if parts.pool.specs else ()
    kv_args = replace(transfers.args, groups=groups)
    config = transfer_config(spec)
    clock = StepClock(parts.device.layers, parts.layers_in_pages)
    manager = PrefillManager(
        kv_args,
        transfers.engine,
        config,
        layers=clock if groups else None,
        followers=transfers.followers,
    )
    manager.set_wakeup(wakeup)
    if groups:
        clock.watch(kv_args.marks(), manager.wake_sender)
    manager.start()
    assert spec.bootstrap is not None, "the worker names a bootstrap server"
    registrar = registrar_of(
        manager,
        kv_args,
        server=spec.bootstrap,
        is_own=spec.disagg.disaggregation_bootstrap_server is None,
        secret=config.secret,
        dp_size=spec.engine.dp_size,
        dp_rank=spec.dp_rank,
    )
    registrar.start()
    checksum = _checksum(spec, parts, wakeup)
    return PrefillRole(
        scheduler=parts.scheduler,
        manager=manager,
        pages=_sender(parts, metadata, kv_args, checksum, layerwise=bool(groups), min_bytes=MIN_BYTES),
        directory=registrar,
        bounds=_bounds(parts),
        prefixes=_prefixes(spec, parts, metadata, transfers, config, manager, checksum=checksum, wakeup=wakeup)
        if fetches
        else None,
        features=_features(spec, parts, wakeup),
    )


def _features(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> FeatureFetches | None:
    return None if parts.arrivals is None else feature_fetches(spec, parts, parts.arrivals, wakeup=wakeup)


def _prefixes(
    spec: SchedulerSpec,
    parts: EngineParts,
    metadata: MetadataBuffers,
    transfers: "_Transfers",
    config: TransferConfig,
    sends: PrefillManager,
    *,
    checksum: Checksum | None,
    wakeup: Callable[[], None],
) -> PrefixExchange:
    receives = DecodeManager(
        transfers.args,
        transfers.engine,
        config,
        lookup=no_lookup,
        is_apart=spec.engine.nnodes > 1,
    )
    start(receives, wakeup)
    policy = FetchPolicy(token_bytes=_page_bytes(transfers.args) / parts.pool.page_size)
    return PrefixExchange(
        fetches=PrefixFetches(
            scheduler=parts.scheduler, manager=receives, metadata=metadata, policy=policy, checksum=checksum
        ),
        server=PrefixServer(
            scheduler=parts.scheduler,
            manager=sends,
            pages=_sender(parts, metadata, transfers.args, checksum),
        ),
        policy=policy,
        source=KVSource(sends.control_address, sends.incarnation),
    )


def _decode(
    spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers, wakeup: Callable[[], None]
) -> DecodeRole:
    config = transfer_config(spec)
    routes = RouteFinder(secret=config.secret)
    transfers = _transfers(spec, parts, metadata, share=partial(SharedEngine, num_users=2))
    manager = DecodeManager(
        transfers.args,
        transfers.engine,
        config,
        lookup=routes.find,
        is_apart=spec.engine.nnodes > 1,
    )
    start(manager, wakeup)
    checksum = _checksum(spec, parts, wakeup)
    return DecodeRole(
        scheduler=parts.scheduler,
        manager=manager,
        metadata=metadata,
        moves_bytes=_moves_bytes(spec),
        prealloc_timeout_s=PREALLOC_TIMEOUT_S,
        checksum=checksum,
        moves=_moves(spec, parts, metadata, transfers, config, checksum=checksum, wakeup=wakeup),
    )


def _moves(
    spec: SchedulerSpec,
    parts: EngineParts,
    metadata: MetadataBuffers,
    transfers: "_Transfers",
    config: TransferConfig,
    *,
    checksum: Checksum | None,
    wakeup: Callable[[], None],
) -> Moves:
    """Compose a decode worker's sender, with its own control plane."""
    timeout_s = min(config.bootstrap_timeout_s, MOVE_TIMEOUT_S)
    manager = PrefillManager(
        transfers.args,
        transfers.engine,
        replace(config, bootstrap_timeout_s=timeout_s),
        followers=transfers.followers,
        computes=False,
    )
    start(manager, wakeup)
    return Moves(
        scheduler=parts.scheduler,
        manager=manager,
        pages=_sender(parts, metadata, transfers.args, checksum),
        source=KVSource(manager.control_address, manager.incarnation),
        moves_bytes=_moves_bytes(spec),
    )


def _sender(
    parts: EngineParts,
    metadata: MetadataBuffers,
    args: KVArgs,
    checksum: Checksum | None,
    *,
    layerwise: bool = False,
    min_bytes: int = 0,
) -> PageSender:
    return PageSender(
        metadata,
        page_size=parts.pool.page_size,
        page_bytes=_page_bytes(args),
        checksum=checksum,
        layerwise=layerwise,
        min_bytes=min_bytes,
    )


def _moves_bytes(spec: SchedulerSpec) -> bool:
    return spec.disagg.disaggregation_transfer_backend != "fake"


def _page_bytes(args: KVArgs) -> int:
    return sum(args.layer_bytes) * args.kv_units


def _layer_groups(spec: SchedulerSpec, args: KVArgs) -> tuple[LayerGroup, ...]:
    ends = list(accumulate(args.layer_bytes))
    ends[-1] = -(-ends[-1] // UNIT_ALIGN_BYTES) * UNIT_ALIGN_BYTES  # padding leaves with the last layer
    return groups_of(ends, mode=spec.disagg.disaggregation_layerwise_transfer)


def _bounds(parts: EngineParts) -> Bounds:
    assert parts.config.context_length is not None, "resolved"
    model = parts.model
    return Bounds(vocab_size=model.vocab_size, context_length=parts.config.context_length, vision=model.vision)


def _checksum(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> Checksum | None:
    if not spec.disagg.disaggregation_kv_checksum:
        return None
    own = RankChecksum(_pools(parts), wakeup=wakeup)
    return alone(own) if parts.group is None else GroupChecksum(own, parts.group.followers)


def _pools(parts: EngineParts) -> RankPools:
    return RankPools(kv=parts.pool, held=parts.held, states=parts.device.states, windows=parts.device.windows)


@dataclass(frozen=True, slots=True)
class _Transfers:
    engine: Engine
    args: KVArgs
    followers: tuple[ProcessMark, ...]


def _transfers(
    spec: SchedulerSpec, parts: EngineParts, metadata: MetadataBuffers, *, share: Callable[[Engine], Engine]
) -> _Transfers:
    """Raises BackendUnavailable, and EngineError if a follower's engine does not start."""
    own, remotes, pools = engine_of(spec, parts.pool), _remotes(parts.group), _pools(parts)
    memory = memory_of(pools)
    args = KVArgs(
        kv=memory.kv,
        aux=metadata.region,
        signature=parts.model.signature(),
        page_size=parts.pool.page_size,
        dtype=_dtype(parts),
        kv_units=parts.held.num_units,
        layer_bytes=_layer_bytes(parts),
        kv_checksum=CHECKSUM_NAME if spec.disagg.disaggregation_kv_checksum else "off",
        ranks=(memory, *(remote.memory for remote in remotes)),
        pools=side_pools(pools),
    )
    engine = RankEngines([share(one) for one in (own, *remotes)]) if remotes else share(own)
    return _Transfers(engine, args, tuple(remote.mark for remote in remotes))


def _remotes(group: Group | None) -> list[RemoteEngine]:
    if group is None:
        return []
    return [
        RemoteEngine(sock, name=group.links.name_of(rank), timeout_s=group.timeout_s)
        for rank, sock in sorted(group.transfers.items())
    ]


def _layer_bytes(parts: EngineParts) -> tuple[int, ...]:
    """Return the bytes of each model layer in a unit; all keep the same.

    Excludes recurrent layers and window layers with another pool; with windows only, a unit is one
    piece. A drafter adds one layer.
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


def _dtype(parts: EngineParts) -> str:
    own, kept = parts.config.dtype, parts.config.kv_cache_dtype
    return own if kept == own else f"{own}, KV in {kept}"
