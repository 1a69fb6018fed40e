"""A running generation as an HTTP answer: one JSON body, or server-sent events."""

from typing import Any, Protocol

from aiohttp import web

from engine.frontend.client.generation import Generation
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.stream import DONE, SSE_HEADERS, event, json_response, open_stream

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


class View(Protocol):
    """How an API shows the samples of a request. `last` follows the last chunk."""

    def body(self, answers: list[TextOutput]) -> Any: ...
    def chunks(self, index: int, output: TextOutput) -> list[Any]: ...
    def last(self) -> list[Any]: ...


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


async def answer(request: web.BaseRequest, generation: Generation, *, view: View, stream: bool) -> web.StreamResponse:
    """Serve the generation, then abort what is unfinished. Headers wait for the first output: its error has a status."""
    with generation:
        if not stream:
            return json_response(view.body(await generation.collect()))
        news = await generation.next()
        response = await open_stream(request, headers=SSE_HEADERS)
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
        return response


async def _send(response: web.StreamResponse, events: list[Any]) -> None:
    if events:
        await response.write(b"".join(map(event, events)))
