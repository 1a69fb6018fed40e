"""Assembly of a worker's role: its managers, and its parts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from bootstrap_server.client import Registrar
from disagg.assembly import Transfers
from disagg.config import SchedulerSpec
from disagg.feature_transfers import bounds_of, feature_fetches
from disagg.features.prefix_fetching import MAX_FETCHES
from disagg.features.prefix_serving import MAX_SERVED
from disagg.layerwise import StepClock, groups_of
from disagg.prefill_role import PrefillRole
from disagg.registration import RouteFinder, registration_of
from disagg.role import PartedRole, PeerPart
from disagg.transfers import transfers_of
from engine.assembly.parts import EngineParts
from engine.kv.cache_spec import UNIT_ALIGN_BYTES
from engine.loop.role import EngineRole
from transfer_backends.contract import KVArgs, LayerGroup

MIN_BYTES = 4 << 20  # per send while the next chunk computes: smaller ones disturb it more than they hide


def make_role(spec: SchedulerSpec, parts: EngineParts, *, wakeup: Callable[[], None]) -> EngineRole:
    """`wakeup`: called by transfer threads when a queue may move.

    Raises ConfigError, BackendUnavailable, and EngineError if a follower's engine does not start.
    """
    if spec.disagg.disaggregation_mode == "null":
        return PartedRole(parts.scheduler, _features(spec, parts, wakeup))
    computes = spec.disagg.disaggregation_mode == "prefill"
    fetches = spec.disagg.prefix_fetch
    num_rows = 2 * parts.scheduler.limits.max_running_requests  # running requests, and as many in transfer
    if fetches:
        num_rows += MAX_FETCHES + MAX_SERVED
    num_managers = 1 if computes and not fetches else 2  # one sends, one receives
    transfers = transfers_of(spec, parts, num_rows=num_rows, num_managers=num_managers, wakeup=wakeup)
    if computes:
        return _prefill(spec, parts, transfers)
    find = RouteFinder(secret=transfers.config.secret).find
    return transfers.decode(find, token_bytes=_token_bytes(parts) if fetches else None)


def _prefill(spec: SchedulerSpec, parts: EngineParts, transfers: Transfers) -> PrefillRole:
    groups = _layer_groups(spec, transfers.args) if parts.pool.specs else ()
    clock = StepClock(parts.device.layers, parts.layers_in_pages)
    sends = transfers.sends(groups, layers=clock if groups else None)
    if groups:
        clock.watch(replace(transfers.args, groups=groups).marks(), sends.on_mark)
    prefixes: Sequence[PeerPart] = ()
    if spec.disagg.prefix_fetch:
        prefixes = transfers.prefixes(sends, token_bytes=_token_bytes(parts))
    features = _features(spec, parts, transfers.wire.wakeup)
    assert spec.bootstrap is not None, "the worker names a bootstrap server"
    registrar = Registrar(
        spec.bootstrap,
        registration_of(sends, transfers.args, dp_size=spec.engine.dp_size, dp_rank=spec.dp_rank),
        secret=transfers.config.secret,
        is_own=spec.disagg.disaggregation_bootstrap_server is None,
    )
    registrar.start()
    return transfers.role.prefill(
        sends,
        registrar,
        (*prefixes, *features),
        bounds=bounds_of(parts),
        layerwise=bool(groups),
        min_bytes=MIN_BYTES,
    )


def _token_bytes(parts: EngineParts) -> int:
    return parts.pool.page_bytes // parts.pool.page_size


def _features(spec: SchedulerSpec, parts: EngineParts, wakeup: Callable[[], None]) -> Sequence[PeerPart]:
    return () if parts.arrivals is None else (feature_fetches(spec, parts, parts.arrivals, wakeup=wakeup),)


def _layer_groups(spec: SchedulerSpec, args: KVArgs) -> tuple[LayerGroup, ...]:
    ends = list(accumulate(args.layer_bytes))
    ends[-1] = -(-ends[-1] // UNIT_ALIGN_BYTES) * UNIT_ALIGN_BYTES  # padding leaves with the last layer
    return groups_of(ends, mode=spec.disagg.disaggregation_layerwise_transfer)
