"""A running generation as an HTTP answer: one JSON body, or server-sent events."""

from typing import Any

from aiohttp import web

from engine.frontend.apis.shared.view import View
from engine.frontend.client.generation import Generation
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.stream import DONE, SSE_HEADERS, event, json_response, open_stream


async def answer(request: web.BaseRequest, generation: Generation, *, view: View, stream: bool) -> web.StreamResponse:
    """Serve the generation, and abort what is unfinished at the end. Headers wait for the first output, whose error has a status."""
    with generation:
        if not stream:
            return json_response(view.body(await generation.collect()))
        first = await generation.next()
        response = await open_stream(request, headers=SSE_HEADERS)
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
        await response.write(DONE)
    except ApiError as e:
        await _send(response, [e.body()])  # too late for a status; no [DONE] follows
    await response.write_eof()


async def _send(response: web.StreamResponse, events: list[Any]) -> None:
    if events:
        await response.write(b"".join(map(event, events)))
