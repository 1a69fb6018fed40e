"""Assembly of a worker's role: its managers, and its parts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from disagg.assembly import source_of
from disagg.config import SchedulerSpec
from disagg.decode_role import DecodeRole
from disagg.feature_transfers import bounds_of, feature_fetches
from disagg.features.prefix_fetching import MAX_FETCHES
from disagg.features.prefix_serving import MAX_SERVED
from disagg.layerwise import StepClock, groups_of
from disagg.prefill_role import PrefillRole
from disagg.registration import RouteFinder, registrar_of
from disagg.role import PartedRole, PeerPart
from disagg.transfer_engine import no_lookup, start
from disagg.transfers import Transfers, transfers_of
from engine.assembly.parts import EngineParts
from engine.kv.cache_spec import UNIT_ALIGN_BYTES
from engine.loop.role import EngineRole
from service.flags import ConfigError
from transfer_backends.contract import KVArgs, LayerGroup
from transfer_backends.prefill.manager import PrefillManager

MOVE_TIMEOUT_S = (
    30.0  # for another decode worker to give pages: until then the request holds memory here and its client waits
)
PAGES_OF_WINDOWS = (
    "--prefix-fetch: layers with a window have pages of their own, which a prefix of another worker does not bring along; give "
    "--disable-hybrid-swa-memory"
)
MIN_BYTES = 4 << 20  # per send while the next chunk computes: smaller ones disturb it more than they hide


def make_role(spec: SchedulerSpec, parts: EngineParts, *, wakeup: Callable[[], None]) -> EngineRole:
    """`wakeup`: called by transfer threads when a queue may move.

    Raises ConfigError, BackendUnavailable, and EngineError if a follower's engine does not start.
    """
    if spec.disagg.disaggregation_mode == "null":
        return PartedRole(parts.scheduler, _features(spec, parts, wakeup))
    computes = spec.disagg.disaggregation_mode == "prefill"
    fetches = computes and spec.disagg.prefix_fetch
    if fetches and parts.device.windows is not None:
        raise ConfigError(PAGES_OF_WINDOWS)
    num_rows = 2 * parts.scheduler.limits.max_running_requests  # running requests, and as many in transfer
    if fetches:
        num_rows += MAX_FETCHES + MAX_SERVED
    num_managers = 1 if computes and not fetches else 2  # one sends, one receives
    transfers = transfers_of(spec, parts, num_rows=num_rows, num_managers=num_managers, wakeup=wakeup)
    return _prefill(spec, parts, transfers) if computes else _decode(parts, transfers)


def _prefill(spec: SchedulerSpec, parts: EngineParts, transfers: Transfers) -> PrefillRole:
    groups = _layer_groups(spec, transfers.args) if parts.pool.specs else ()
    kv_args, config = replace(transfers.args, groups=groups), transfers.config
    clock = StepClock(parts.device.layers, parts.layers_in_pages)
    layers = clock if groups else None
    manager = PrefillManager(kv_args, transfers.engine, config, layers=layers, followers=transfers.followers)
    manager.set_wakeup(transfers.wakeup)
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
    role = transfers.role
    prefixes: Sequence[PeerPart] = ()
    if spec.disagg.prefix_fetch:
        token_bytes = parts.pool.page_bytes // parts.pool.page_size
        receives = transfers.receives(no_lookup)
        prefixes = role.prefixes(manager, receives, source_of(manager), token_bytes=token_bytes)
    return role.prefill(
        manager,
        registrar,
        (*prefixes, *_features(spec, parts, transfers.wakeup)),
        bounds=bounds_of(parts),
        layerwise=bool(groups),
        min_bytes=MIN_BYTES,
    )


def _features(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> Sequence[PeerPart]:
    return () if parts.arrivals is None else (feature_fetches(spec, parts, parts.arrivals, wakeup=wakeup),)


def _decode(parts: EngineParts, transfers: Transfers) -> DecodeRole:
    """Compose a role whose sender of moved requests has a control plane of its own."""
    receives = transfers.receives(RouteFinder(secret=transfers.config.secret).find)
    timeout_s = min(transfers.config.bootstrap_timeout_s, MOVE_TIMEOUT_S)
    config = replace(transfers.config, bootstrap_timeout_s=timeout_s)
    sends = PrefillManager(transfers.args, transfers.engine, config, followers=transfers.followers, computes=False)
    start(sends, transfers.wakeup)
    moves = transfers.role.moves(sends, source_of(sends))
    return transfers.role.decode(receives, (moves,))


def _layer_groups(spec: SchedulerSpec, args: KVArgs) -> tuple[LayerGroup, ...]:
    ends = list(accumulate(args.layer_bytes))
    ends[-1] = -(-ends[-1] // UNIT_ALIGN_BYTES) * UNIT_ALIGN_BYTES  # padding leaves with the last layer
    return groups_of(ends, mode=spec.disagg.disaggregation_layerwise_transfer)
