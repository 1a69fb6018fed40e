"""Signatures of calls and answers, except for `OPEN_PATHS`."""

import logging
from collections.abc import Callable

from aiohttp import web

from service.http.api_shapes import OPENAI
from service.http.errors import ApiError
from service.http.routes import Handler
from service.security.signing import AUTH_HEADER, CHALLENGE_HEADER, Call, Verdict, Verifier

LOG_EVERY_S = 5.0
OPEN_PATHS = ("/health", "/metrics")  # for probes and scrapers; no addresses

log = logging.getLogger(__name__)


class SignatureCheck:
    """Verifies calls, signs answers, counts refusals."""

    def __init__(self, verifier: Verifier | None, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._verifier = verifier
        self._clock = clock
        self._next_log_s = 0.0

    async def answer(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        verifier = self._verifier
        if verifier is None or request.path in OPEN_PATHS:
            return await handler(request)
        now_s = self._clock()
        call = Call(request.method, request.raw_path, await request.read())
        verdict, nonce = verifier.verify(request.headers.get(AUTH_HEADER, ""), call, now_s)
        if verdict is Verdict.FORGED:
            self._count(request, now_s)
        if verdict is not Verdict.GOOD:
            return _unsigned(verifier.challenge(now_s))
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            response.headers[AUTH_HEADER] = verifier.sign_answer(nonce, status=response.status, body=response.body)
        return response

    def _count(self, request: web.BaseRequest, now_s: float) -> None:
        self.num_refused += 1
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            text = "%s was refused: its call is not signed with this cluster's secret, or was made before (%d so far)"
            log.warning(text, request.remote, self.num_refused)


def _unsigned(challenge: str) -> web.Response:
    message = f"{AUTH_HEADER}: missing or wrong; start every worker with the same --cluster-secret-file"
    response = OPENAI.response(ApiError(401, message, code="unsigned"))
    response.headers[CHALLENGE_HEADER] = challenge
    return response
