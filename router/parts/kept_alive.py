"""Keep-alive comments while a streaming request is silent.

It may still change workers. After a comment an error is the stream's last event.
"""

import asyncio
from collections.abc import Mapping

from fastapi import Response

from router.attempts.request import ClientStream, RequestContext, Serve
from router.requests.answer import HANDED_BACK, error_of
from service.http.errors import ApiError, draining
from service.http.keep_alive import KeepAlive
from service.http.request import HttpRequest, StreamedResponse
from service.http.routes import errors_of


class KeptStream(ClientStream):
    """A stream that comments may have opened."""

    def __init__(self, alive: KeepAlive) -> None:
        self._alive = alive

    async def open(self, http: HttpRequest, *, status: int, headers: Mapping[str, str]) -> StreamedResponse:
        return await self._alive.open(status=status, headers=headers)

    async def end(self) -> None:
        await self._alive.end()


async def serve_kept_alive(request: RequestContext, serve: Serve, *, interval_s: float) -> Response:
    """A `ServePart`."""
    if not request.parsed.streams:
        return await serve(request)
    with KeepAlive(request.http, interval_s=interval_s) as alive:
        request.client = KeptStream(alive)
        try:
            answer = await serve(request)
        except ApiError as error:
            if alive.stream is None:
                raise
            return await _end(alive, _failed(request, error))
        except asyncio.CancelledError:
            if alive.stream is None or not request.took_cancel():
                raise
            return await _end(alive, _failed(request, draining(HANDED_BACK)))
        if alive.stream is None or answer is alive.stream:
            return answer
        assert isinstance(answer, Response) and isinstance(answer.body, bytes), answer
        if answer.status_code < 300:  # a whole answer, as the worker does not stream
            return await _end(alive, b"data: " + b" ".join(answer.body.split(b"\n")) + b"\n\n")
        return await _end(alive, _failed(request, error_of(answer.status_code, answer.body)))


def _failed(request: RequestContext, error: ApiError) -> bytes:
    request.failure = error.message
    return errors_of(request.http).last_event(error)


async def _end(alive: KeepAlive, last_event: bytes) -> Response:
    await alive.end()
    assert alive.stream is not None
    await alive.stream.end(last_event)
    return alive.stream
