"""Whether a request is served at all, now: limits and priority (door.py), objectives (forecast.py). Reads requests; picks no worker."""

import math
from collections.abc import Awaitable, Sequence

from aiohttp import web

from router.admission.door import Door, Refused
from router.admission.forecast import Forecast, Slo, TooLate, read_slo
from router.admission.line import Limits, Ticket
from router.admission.rate_limit import client_of
from router.body import BadBody, ParsedBody, named_priority
from router.choice.chooser import Chooser
from router.choice.policies import Ask
from router.config import RouterConfig
from router.pool.peer_load import PeerLoad
from router.pool.worker import Worker
from service.http.errors import error_response
from service.http.guard import CALLER

PRIORITY_HEADER = "x-priority"
MAX_PRIORITY = 1 << 31


class Admission:
    """`forecast` learns from those that are served."""

    def __init__(self, config: RouterConfig, *, chooser: Chooser, peers: PeerLoad | None = None) -> None:
        self.forecast = Forecast()
        self._chooser = chooser
        self._by_client = config.max_concurrent_requests_per_client > 0 or config.queue_size > 0
        limits = Limits(
            running=config.max_concurrent_requests,
            per_client=config.max_concurrent_requests_per_client,
            queue=config.queue_size,
            queue_timeout_s=config.queue_timeout_s,
        )
        self.door = Door(limits, peers)
        self._slo = Slo(config.slo_ttft_s or math.inf, config.slo_itl_s or math.inf)

    def refuse_early(self, request: web.BaseRequest) -> None:
        """Before its body is read. `Refused`."""
        self.door.refuse_early(self._client(request))

    def enter(self, request: web.BaseRequest, parsed: ParsedBody) -> Awaitable[Ticket]:
        """Waits until the request may run; it must `leave`. `Refused`; `BadBody` for a priority that is none."""
        return self.door.enter(self._client(request), priority=_priority(request, parsed))

    def leave(self, ticket: Ticket) -> None:
        """The request is over."""
        self.door.leave(ticket)

    def slo_of(self, request: web.BaseRequest) -> Slo:
        """What it asks for. `BadBody`."""
        try:
            return read_slo(request.headers, self._slo)
        except ValueError as err:
            raise BadBody(None, str(err)) from None

    def in_time(self, pool: Sequence[Worker], ask: Ask, slo: Slo, *, now_s: float) -> Sequence[Worker]:
        """Those of `pool` that would keep `slo`. `Refused` where none would."""
        if not slo.is_set:
            return pool
        tokens = self._chooser.uncached_tokens(pool, ask)
        try:
            return self.forecast.in_time(pool, slo, tokens=tokens, now_s=now_s)
        except TooLate as err:
            why, headers = f"slo_{err.what}", {"Retry-After": str(err.retry_after_s)}
            raise Refused(error_response(429, str(err), code=why, headers=headers), why) from None

    def _client(self, request: web.BaseRequest) -> str:
        return client_name(request) if self._by_client else ""


def client_name(request: web.BaseRequest) -> str:
    """The client, for what is counted by client: its API key's name, else its address."""
    return request[CALLER].name or client_of(request.remote)


def _priority(request: web.BaseRequest, parsed: ParsedBody) -> int:
    """Of the body, else of the header; higher goes first; 0 where nobody says."""
    said = named_priority(parsed)
    text = request.headers.get(PRIORITY_HEADER)
    if said is None and text is not None:
        try:
            said = int(text)
        except ValueError:
            raise BadBody(None, f"{PRIORITY_HEADER}: must be an integer, got {text[:40]!r}") from None
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, said or 0))
