"""From a running generation to an HTTP answer: one JSON body, or server-sent events as they come.

Owns the SSE framing and when headers are sent. What the body and the chunks look like is the `View`'s.
"""

from typing import Any, Protocol

import msgspec
from aiohttp import web

from engine.detokenizer.sample import TextOutput
from engine.frontend.client import Generation
from engine.frontend.errors import ApiError

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)  # headers are out: no other answer is possible

_encode = msgspec.json.Encoder().encode


class _CoalescedResponse(web.StreamResponse):
    """Headers leave with the first event, in one packet: one wake-up less for whoever reads."""

    _send_headers_immediately = False


class View(Protocol):
    """How one API shows the samples of a request. Chunks come in order; `last` follows the last one."""

    def body(self, answers: list[TextOutput]) -> Any: ...
    def chunks(self, index: int, output: TextOutput) -> list[Any]: ...
    def last(self) -> list[Any]: ...


def json_response(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


async def answer(request: web.Request, generation: Generation, *, view: View, stream: bool) -> web.StreamResponse:
    """Serve the generation; whatever has not finished when this ends is aborted.

    The first output is awaited before the headers go out: what fails before it has a proper status.
    """
    with generation:
        if not stream:
            return json_response(view.body(await generation.collect()))
        first = await generation.next()
        response = _CoalescedResponse(headers=SSE_HEADERS)
        request[STREAMING] = True
        await response.prepare(request)
        await _send_events(response, generation, view=view, news=first)
        return response


async def _send_events(
    response: web.StreamResponse, generation: Generation, *, view: View, news: list[tuple[int, TextOutput]]
) -> None:
    try:
        while True:
            await _send(response, [chunk for index, output in news for chunk in view.chunks(index, output)])
            if generation.done:
                break
            news = await generation.next()
        await _send(response, view.last())
        await response.write(b"data: [DONE]\n\n")
    except ApiError as e:
        await _send(response, [e.body()])  # too late for a status; no [DONE] follows
    await response.write_eof()


async def _send(response: web.StreamResponse, events: list[Any]) -> None:
    if events:
        await response.write(b"".join(b"data: " + _encode(event) + b"\n\n" for event in events))
