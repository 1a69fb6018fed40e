"""Whether a request is served now: limits, priority, objectives."""

import math
from collections.abc import Sequence

from aiohttp import web

from router.admission.forecast import Forecast, TooLate
from router.admission.queue import Ticket
from router.admission.rate_limit import client_of
from router.admission.turns import RequestRefused, Turns
from router.attempts.request import ITL_HEADER, TTFT_HEADER, RequestContext, Slo, read_slo
from router.body import BadBody, ParsedBody, named_priority
from router.choice.chooser import Chooser
from router.config import AdmissionFlags
from router.pool.shared_load import SharedLoad
from router.pool.worker import Worker
from service.http.guard import CALLER

PRIORITY_HEADER = "x-priority"
MAX_PRIORITY = 1 << 31


class Admission:
    """`forecast` learns from the requests that are served."""

    def __init__(self, config: AdmissionFlags, *, chooser: Chooser, peers: SharedLoad | None = None) -> None:
        self.forecast = Forecast()
        self.turns = Turns(config, peers)
        self._chooser = chooser
        self._by_client = config.max_concurrent_requests_per_client > 0 or config.queue_size > 0
        self._has_slo = config.slo_ttft_s > 0 or config.slo_itl_s > 0
        self._slo = Slo(config.slo_ttft_s or math.inf, config.slo_itl_s or math.inf)

    @property
    def num_running(self) -> int:
        """Requests that run in all processes of this router."""
        return self.turns.queue.num_everywhere

    @property
    def num_waiting(self) -> int:
        return self.turns.queue.num_waiting

    def refuse_early(self, http: web.BaseRequest) -> None:
        self.turns.refuse_early(self._client(http))

    async def enter(self, request: RequestContext) -> Ticket:
        """Wait until the request may run; `leave` must follow. `RequestRefused`; `BadBody`: the priority is no number."""
        priority = _priority(request.http, request.parsed)
        return await self.turns.enter(self._client(request.http), priority=priority)

    def slo_of(self, http: web.BaseRequest) -> Slo | None:
        headers = http.headers
        if TTFT_HEADER not in headers and ITL_HEADER not in headers:
            return self._slo if self._has_slo else None
        try:
            return read_slo(headers, self._slo)
        except ValueError as err:
            raise BadBody(None, str(err)) from None

    def in_time(self, pool: Sequence[Worker], request: RequestContext, *, now_s: float) -> Sequence[Worker]:
        """The workers of `pool` that would keep the request's objectives. `RequestRefused` if there are none."""
        if request.slo is None:
            return pool
        tokens = self._chooser.uncached_tokens(pool, request.hints)
        try:
            return self.forecast.in_time(pool, request.slo, tokens=tokens, now_s=now_s)
        except TooLate as err:
            raise RequestRefused(str(err), why=f"slo_{err.what}", retry_after_s=err.retry_after_s) from None

    def _client(self, http: web.BaseRequest) -> str:
        return client_name(http) if self._by_client else ""


def client_name(http: web.BaseRequest) -> str:
    """The client for limits: the name of its API key, else its address."""
    return http[CALLER].name or client_of(http.remote)


def _priority(http: web.BaseRequest, parsed: ParsedBody) -> int:
    """Of the body, else of the header, else 0; higher goes first."""
    named = named_priority(parsed)
    text = http.headers.get(PRIORITY_HEADER)
    if named is None and text is not None:
        try:
            named = int(text)
        except ValueError:
            raise BadBody(None, f"{PRIORITY_HEADER}: must be an integer, got {text[:40]!r}") from None
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, named or 0))
