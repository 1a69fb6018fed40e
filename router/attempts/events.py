"""Events in the life of a request, and their observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.attempts.pair_attempt import PairAttempt
    from router.attempts.request import RequestContext
    from router.attempts.upstream_call import CallFailed
    from router.pool.worker import Role


class RequestObserver:
    """Receives events. An event that an observer does not override costs nothing (`Events.of`)."""

    def on_routed(self, request: RequestContext) -> None:
        """The body was read, and workers may serve it."""

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        """An attempt was charged to its workers and sent."""

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        """The answer of this attempt begins."""

    def on_chunk(self, request: RequestContext, attempt: PairAttempt, chunk: bytes, now_s: float) -> None:
        """A further piece of a stream came; `request.last_byte_s` is still the time of the one before."""

    def on_call_failed(self, failure: CallFailed, now_s: float) -> None:
        """A worker failed, whether or not that ends the attempt."""

    def on_attempt_failed(
        self, request: RequestContext, attempt: PairAttempt, failure: CallFailed, now_s: float
    ) -> None:
        """An attempt failed before its answer began; `on_call_failed` follows."""

    def on_retry(self, request: RequestContext, failure: CallFailed) -> None:
        """The request goes to other workers."""

    def on_no_worker(self, request: RequestContext, missing: list[Role]) -> None:
        """These roles have no worker for the request."""

    def on_attempt_ended(self, attempt: PairAttempt, now_s: float) -> None:
        """The client no longer needs this attempt; it is still charged to its workers."""

    def on_prefill_ended(self, attempt: PairAttempt, now_s: float) -> None:
        """The prefill call has ended, too, now or after the attempt."""

    def on_ended(self, request: RequestContext, status: int, now_s: float) -> None:
        """The request was answered; 499: its client went away."""

    def on_refused(self, why: str) -> None:
        """A request was refused before it was sent anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """For each event the methods to call."""

    on_routed: tuple[Callable[[RequestContext], None], ...] = ()
    on_sent: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    on_first_byte: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    on_chunk: tuple[Callable[[RequestContext, PairAttempt, bytes, float], None], ...] = ()
    on_call_failed: tuple[Callable[[CallFailed, float], None], ...] = ()
    on_attempt_failed: tuple[Callable[[RequestContext, PairAttempt, CallFailed, float], None], ...] = ()
    on_retry: tuple[Callable[[RequestContext, CallFailed], None], ...] = ()
    on_no_worker: tuple[Callable[[RequestContext, list[Role]], None], ...] = ()
    on_attempt_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    on_prefill_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    on_ended: tuple[Callable[[RequestContext, int, float], None], ...] = ()
    on_refused: tuple[Callable[[str], None], ...] = ()

    @classmethod
    def of(cls, observers: Iterable[RequestObserver]) -> Events:
        listeners = list(observers)
        names = [event.name for event in fields(cls)]
        return cls(**{name: tuple(getattr(o, name) for o in listeners if _overrides(o, name)) for name in names})


def _overrides(observer: RequestObserver, name: str) -> bool:
    return getattr(type(observer), name) is not getattr(RequestObserver, name)
