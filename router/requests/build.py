"""Composes the dispatcher of the enabled features."""

from functools import partial

import aiohttp

from router.admission.admission import Admission
from router.admission.forecast import Forecast
from router.attempts.pair_attempt import AttemptLauncher
from router.attempts.request import Events
from router.attempts.upstream_call import (
    circuit_answered,
    circuit_failed,
    circuit_prefilled,
    circuit_started,
    report_unreachable,
)
from router.choice.chooser import Chooser
from router.choice.route_costs import Objectives
from router.client.credentials import Credentials
from router.config import RouterConfig
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from router.metrics import RouterMetrics
from router.pool.health import HealthMonitor
from router.pool.worker import PAIR, UNIFIED, Way
from router.requests.dispatch import Dispatcher
from router.requests.failover import Failover
from router.requests.images import BodyImages
from router.requests.live import LiveRequests
from router.requests.picking import Picker
from router.requests.reconnect import Reconnect
from router.requests.responses import Responses
from router.requests.route_choice import RouteChooser


def ways_of(config: RouterConfig) -> tuple[Way, ...]:
    if config.mixed:
        return PAIR, UNIFIED
    return (PAIR,) if config.pd_disaggregation else (UNIFIED,)


def make_events(
    *,
    traces: RequestTraces,
    recorder: Recorder,
    metrics: RouterMetrics,
    forecast: Forecast,
    monitor: HealthMonitor,
) -> Events:
    return Events(
        on_routed=(traces.on_routed,),
        on_sent=(traces.on_sent, recorder.on_sent, forecast.on_sent),
        on_first_byte=(recorder.on_first_byte, metrics.on_first_byte, forecast.on_first_byte, circuit_started),
        on_chunk=(recorder.on_chunk, forecast.on_chunk),
        on_attempt_failed=(traces.on_attempt_failed,),
        on_call_failed=(
            recorder.on_call_failed,
            metrics.on_call_failed,
            circuit_failed,
            partial(report_unreachable, monitor),
        ),
        on_retry=(metrics.on_retry,),
        on_failover=(metrics.on_failover,),
        on_no_worker=(recorder.on_no_worker, metrics.on_no_worker),
        on_attempt_ended=(forecast.on_attempt_ended, circuit_answered),
        on_prefill_ended=(circuit_prefilled,),
        on_ended=(traces.on_ended,),
        on_refused=(metrics.on_refused,),
    )


def make_dispatcher(
    config: RouterConfig,
    *,
    launcher: AttemptLauncher,
    chooser: Chooser,
    admission: Admission,
    metrics: RouterMetrics,
    credentials: Credentials,
    live: LiveRequests,
    responses: Responses,
    session: aiohttp.ClientSession,
) -> Dispatcher:
    ways = None
    if config.mixed:
        wanted = Objectives(config.mixed_ttft_s, config.mixed_itl_s)
        ways = RouteChooser(policies=chooser.policies, forecast=admission.forecast, wanted=wanted)
    picker = Picker(
        table=launcher.table,
        policies=chooser.policies,
        admission=admission,
        wait_s=config.retry_wait_s,
        silence_s=config.dead_worker_timeout_s,
        clock=launcher.clock,
        ways=ways,
    )
    failover = None
    if config.failover_max:
        failover = Failover(most=config.failover_max, retry_max=config.retry_max, picker=picker, launcher=launcher)
    reconnect = None
    if config.resume_window_s and launcher.secret is not None:
        reconnect = Reconnect(
            window_s=config.resume_window_s,
            table=launcher.table,
            session=session,
            credentials=credentials,
            secret=launcher.secret,
        )
    return Dispatcher(
        ways=ways_of(config),
        picker=picker,
        admission=admission,
        launcher=launcher,
        live=live,
        responses=responses,
        retry_max=config.retry_max,
        retry_backoff_s=config.retry_backoff_s,
        keep_alive_s=config.sse_keep_alive_interval_s,
        credentials=credentials if credentials.has_own else None,
        chooser=chooser if chooser.needs_keys or chooser.needs_session else None,
        failover=failover,
        reconnect=reconnect,
        images=BodyImages(config, most_bytes=config.max_body_bytes),
    )
