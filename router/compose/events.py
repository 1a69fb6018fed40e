"""The receivers of events."""

import logging
from collections.abc import Sequence
from functools import partial

from router.attempts.request import Events
from router.attempts.upstream_call import (
    CallFailed,
    circuit_answered,
    circuit_failed,
    circuit_prefilled,
    circuit_started,
)
from router.history.forecast import Forecast
from router.history.metrics import RouterMetrics
from router.history.recorder import Recorder, RequestTraces
from router.parts.prefix import Conversations
from router.pool.health import HealthMonitor

log = logging.getLogger(__name__)


def make_events(
    *,
    traces: RequestTraces,
    recorder: Recorder,
    metrics: RouterMetrics,
    forecast: Forecast,
    monitor: HealthMonitor,
    conversations: Sequence[Conversations],
) -> Events:
    return Events(
        on_routed=(traces.on_routed,),
        on_sent=(traces.on_sent, recorder.on_sent, forecast.on_sent, *(one.on_sent for one in conversations)),
        on_first_byte=(recorder.on_first_byte, metrics.on_first_byte, forecast.on_first_byte, circuit_started),
        on_chunk=(recorder.on_chunk, forecast.on_chunk),
        on_attempt_failed=(traces.on_attempt_failed,),
        on_call_failed=(
            recorder.on_call_failed,
            metrics.on_call_failed,
            circuit_failed,
            partial(_report_unreachable, monitor),
        ),
        on_retry=(metrics.on_retry,),
        on_failover=(metrics.on_failover,),
        on_no_worker=(recorder.on_no_worker, metrics.on_no_worker),
        on_attempt_ended=(
            *(one.on_attempt_ended for one in conversations),
            forecast.on_attempt_ended,
            circuit_answered,
        ),
        on_prefill_ended=(circuit_prefilled,),
        on_ended=(traces.on_ended,),
        on_refused=(metrics.on_refused,),
    )


def _report_unreachable(monitor: HealthMonitor, failure: CallFailed, now_s: float) -> None:
    if failure.reason in ("refused", "lost") or failure.draining:
        log.debug("%s", failure)  # the worker's health, the failover or the request's error has a line
        refused = failure.detail if failure.reason == "refused" else ""
        monitor.on_unreachable(failure.worker, refused=refused, draining=failure.draining)
