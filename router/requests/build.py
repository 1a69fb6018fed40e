"""Puts a dispatcher together; a feature that no flag turns on is not in the path of a request."""

from collections.abc import Callable

from router.admission.admission import Admission
from router.attempts.events import Events
from router.attempts.pair_attempt import AttemptLauncher, RoomMinter
from router.choice.chooser import Chooser
from router.client.credentials import Credentials
from router.client.upstream import Upstream
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from router.requests.dispatch import Dispatcher, RequestReader, Retries
from router.requests.hedging import Budget, Hedging
from router.requests.live import LiveRequests
from router.requests.picking import Picker


def roles_of(config: RouterConfig) -> tuple[Role, ...]:
    return (Role.PREFILL, Role.DECODE) if config.pd_disaggregation else (Role.UNIFIED,)


def make_dispatcher(
    config: RouterConfig,
    *,
    table: WorkerTable,
    rooms: RoomMinter,
    chooser: Chooser,
    admission: Admission,
    upstream: Upstream,
    events: Events,
    metrics: RouterMetrics,
    credentials: Credentials,
    secret: bytes | None,
    live: LiveRequests,
    clock: Callable[[], float],
) -> Dispatcher:
    launcher = AttemptLauncher(table=table, rooms=rooms, upstream=upstream, events=events, secret=secret, clock=clock)
    picker = Picker(
        table=table,
        policies=chooser.policies,
        admission=admission,
        wait_s=config.retry_wait_s,
        silence_s=config.dead_worker_timeout_s,
        clock=clock,
    )
    hedging = None
    if config.hedge_after_s:
        hedging = Hedging(
            default_s=config.hedge_after_s,
            budget=Budget(config.hedge_budget),
            picker=picker,
            launcher=launcher,
            admission=admission,
            metrics=metrics,
            clock=clock,
        )
    reader = RequestReader(
        roles=roles_of(config),
        picker=picker,
        admission=admission,
        events=events,
        credentials=credentials if credentials.has_own else None,
        chooser=chooser if chooser.needs_keys or chooser.needs_session else None,
        hedging=hedging,
    )
    return Dispatcher(
        reader=reader,
        launcher=launcher,
        live=live,
        rooms=rooms,
        table=table,
        retries=Retries(limit=config.retry_max, backoff_s=config.retry_backoff_s),
        clock=clock,
    )
