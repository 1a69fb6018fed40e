"""The events of a request and their receivers (set in requests/build.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.attempts.pair_attempt import PairAttempt
    from router.attempts.request import RequestContext
    from router.attempts.upstream_call import CallFailed
    from router.pool.worker import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    # The body was read, and workers may serve it.
    on_routed: tuple[Callable[[RequestContext], None], ...] = ()
    # An attempt was charged to its workers and sent.
    on_sent: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    # The answer of this attempt begins.
    on_first_byte: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    # A further piece of a stream came; `request.last_byte_s` is still the time of the one before.
    on_chunk: tuple[Callable[[RequestContext, PairAttempt, bytes, float], None], ...] = ()
    # An attempt failed before its answer began; `on_call_failed` follows.
    on_attempt_failed: tuple[Callable[[RequestContext, PairAttempt, CallFailed, float], None], ...] = ()
    # A worker failed, whether or not that ends the attempt.
    on_call_failed: tuple[Callable[[CallFailed, float], None], ...] = ()
    # The request goes to other workers.
    on_retry: tuple[Callable[[CallFailed], None], ...] = ()
    # The worker of a stream was lost, and its answer goes on at others or not.
    on_failover: tuple[Callable[[CallFailed, PairAttempt | None], None], ...] = ()
    # These roles have no worker for the request.
    on_no_worker: tuple[Callable[[list[Role]], None], ...] = ()
    # The client no longer needs this attempt; it is still charged to its workers.
    on_attempt_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    # The prefill call has ended, too, now or after the attempt.
    on_prefill_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    # The request was answered; 499: its client went away.
    on_ended: tuple[Callable[[RequestContext, int, float], None], ...] = ()
    # A request was refused before it was sent anywhere.
    on_refused: tuple[Callable[[str], None], ...] = ()
