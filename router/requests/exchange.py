"""One client's request while it is served: what was read of it, and what was decided for good. Data, no behaviour."""

import msgspec
from aiohttp import web

from router.admission.forecast import Slo
from router.body import ParsedBody
from router.choice.policies import Ask
from router.pool.worker import Role
from router.requests.attempts import Attempts
from router.requests.journey import Journey
from router.requests.legs import Call
from router.requests.live import LiveRequest


class Exchange(msgspec.Struct, kw_only=True):
    """`hedge_after_s`: how long its answer may keep silent before a second attempt is made beside the first; None: for ever."""

    request: web.BaseRequest
    request_id: str
    parsed: ParsedBody
    ask: Ask
    body: bytes
    call: Call
    live: LiveRequest
    started_s: float
    roles: tuple[Role, ...]
    model: str  # that its workers must serve; "": any will do
    slo: Slo
    journey: Journey
    hedge_after_s: float | None = None
    attempts: Attempts = msgspec.field(default_factory=Attempts)
