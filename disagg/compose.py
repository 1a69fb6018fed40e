"""Assembly of a worker's role: metadata buffers, transfer engine, manager."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from disagg.config import SchedulerSpec
from disagg.decode_role import PREALLOC_TIMEOUT_S, DecodeRole
from disagg.features.feature_transfers import feature_fetches
from disagg.features.moving import Moves
from disagg.features.prefix_exchange import MAX_SERVED, PrefixExchange, PrefixServer
from disagg.features.prefix_fetching import MAX_FETCHES, FetchPolicy, PrefixFetches
from disagg.features.recompute import Bounds, Recomputes
from disagg.features.resumption import Resumption
from disagg.layerwise import StepClock, groups_of
from disagg.metadata import Checksum, MetadataBuffers
from disagg.outgoing import PageSender, PromptHandovers
from disagg.prefill_role import PrefillRole
from disagg.registration import RouteFinder, registrar_of
from disagg.role import PartedRole, PeerPart
from disagg.transfer_engine import engine_of, memory_of, no_lookup, side_pools, start, transfer_config
from engine.assembly.parts import EngineParts
from engine.kv.cache_spec import UNIT_ALIGN_BYTES
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.loop.role import EngineRole
from engine.messages import KVSource
from engine.ranks.group import Group
from engine.ranks.rank_checksum import GroupChecksum, RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from service.flags import ConfigError
from transfer_backends.contract import KVArgs, LayerGroup
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.ports import Engine, Lookup
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
        return PartedRole(parts.scheduler, _features(spec, parts, wakeup))
    return (_prefill if spec.disagg.disaggregation_mode == "prefill" else _decode)(_Site(spec, parts, wakeup))


def _prefill(site: "_Site") -> PrefillRole:
    spec, parts, config = site.spec, site.parts, site.config
    groups = _layer_groups(spec, site.args) if parts.pool.specs else ()
    kv_args = replace(site.args, groups=groups)
    clock = StepClock(parts.device.layers, parts.layers_in_pages)
    layers = clock if groups else None
    manager = PrefillManager(kv_args, site.engine, config, layers=layers, followers=site.followers)
    manager.set_wakeup(site.wakeup)
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
    prompts = PromptHandovers(parts.scheduler, site.sender(layerwise=bool(groups), min_bytes=MIN_BYTES))
    return PrefillRole(
        scheduler=parts.scheduler,
        manager=manager,
        prompts=prompts,
        directory=registrar,
        parts=(
            *([_prefixes(site, manager)] if spec.disagg.prefix_fetch else []),
            *_features(spec, parts, site.wakeup),
            Recomputes(scheduler=parts.scheduler, manager=manager, prompts=prompts, bounds=_bounds(parts)),
        ),
    )


def _features(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> Sequence[PeerPart]:
    return () if parts.arrivals is None else (feature_fetches(spec, parts, parts.arrivals, wakeup=wakeup),)


def _prefixes(site: "_Site", sends: PrefillManager) -> PrefixExchange:
    scheduler, pool, receives = site.parts.scheduler, site.parts.pool, site.receives(no_lookup)
    policy = FetchPolicy(token_bytes=site.page_bytes / pool.page_size)
    return PrefixExchange(
        fetches=PrefixFetches(scheduler=scheduler, manager=receives, metadata=site.metadata, policy=policy),
        server=PrefixServer(scheduler=scheduler, manager=sends, pages=site.sender()),
        policy=policy,
        source=KVSource(sends.control_address, sends.incarnation),
        token_bytes=pool.page_bytes // pool.page_size,
    )


def _decode(site: "_Site") -> DecodeRole:
    scheduler, metadata, moves_bytes = site.parts.scheduler, site.metadata, site.moves_bytes
    manager = site.receives(RouteFinder(secret=site.config.secret).find)
    resumption = Resumption(scheduler=scheduler, manager=manager, metadata=metadata, moves_bytes=moves_bytes)
    return DecodeRole(
        scheduler=scheduler,
        manager=manager,
        metadata=metadata,
        moves_bytes=moves_bytes,
        prealloc_timeout_s=PREALLOC_TIMEOUT_S,
        parts=(resumption, _moves(site)),
    )


def _moves(site: "_Site") -> Moves:
    """Compose a decode worker's sender, with its own control plane."""
    config = replace(site.config, bootstrap_timeout_s=min(site.config.bootstrap_timeout_s, MOVE_TIMEOUT_S))
    manager = PrefillManager(site.args, site.engine, config, followers=site.followers, computes=False)
    start(manager, site.wakeup)
    return Moves(
        scheduler=site.parts.scheduler,
        manager=manager,
        pages=site.sender(),
        source=KVSource(manager.control_address, manager.incarnation),
        moves_bytes=site.moves_bytes,
    )


class _Site:
    """Engine, memory and metadata rows that a role and its parts share.

    Raises ConfigError, BackendUnavailable, and EngineError if a follower's engine does not start.
    """

    def __init__(self, spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> None:
        decodes = spec.disagg.disaggregation_mode == "decode"
        fetches = spec.disagg.prefix_fetch and not decodes
        if fetches and parts.device.windows is not None:
            raise ConfigError(PAGES_OF_WINDOWS)
        self.spec, self.parts, self.wakeup = spec, parts, wakeup
        self.config = transfer_config(spec)
        self.moves_bytes = spec.disagg.disaggregation_transfer_backend != "fake"
        parts.weights.number()  # now: no hand-over should read files
        self.metadata = MetadataBuffers(
            2 * parts.scheduler.limits.max_running_requests  # running requests, and as many in transfer
            + (MAX_FETCHES + MAX_SERVED) * fetches,
            weights=parts.weights.number,
            checksum=_checksum(spec, parts, wakeup),
        )
        own, remotes, pools = engine_of(spec, parts.pool), _remotes(parts.group), _pools(parts)
        memory = memory_of(pools)
        self.args = KVArgs(
            kv=memory.kv,
            aux=self.metadata.region,
            signature=parts.model.signature(),
            page_size=parts.pool.page_size,
            dtype=_dtype(parts),
            kv_units=parts.held.num_units,
            layer_bytes=_layer_bytes(parts),
            kv_checksum=CHECKSUM_NAME if spec.disagg.disaggregation_kv_checksum else "off",
            ranks=(memory, *(remote.memory for remote in remotes)),
            pools=side_pools(pools),
        )
        self.page_bytes = sum(self.args.layer_bytes) * self.args.kv_units
        self.followers = tuple(remote.mark for remote in remotes)
        is_shared = fetches or decodes  # it sends and receives
        engines: list[Engine] = [SharedEngine(one, num_users=2) if is_shared else one for one in (own, *remotes)]
        self.engine = RankEngines(engines) if remotes else engines[0]

    def sender(self, *, layerwise: bool = False, min_bytes: int = 0) -> PageSender:
        page_size = self.parts.pool.page_size
        return PageSender(
            self.metadata, page_size=page_size, page_bytes=self.page_bytes, layerwise=layerwise, min_bytes=min_bytes
        )

    def receives(self, lookup: Lookup) -> DecodeManager:
        is_apart = self.spec.engine.nnodes > 1
        manager = DecodeManager(self.args, self.engine, self.config, lookup=lookup, is_apart=is_apart)
        start(manager, self.wakeup)
        return manager


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
