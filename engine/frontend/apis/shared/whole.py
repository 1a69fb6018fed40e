"""Non-streamed answers that may move: frames for the router, then the body.

Short answers have no frames.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.resumable import WholeFrames
from engine.frontend.client.generation import Generation, add
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.resume import FRAMES_TYPE, Begun, failed_frame
from service.http.routes import errors_of
from service.http.stream import json_response, open_stream

FRAMES_EVERY_S = 0.25

_encode = msgspec.json.Encoder().encode


async def answer_framed(
    request: web.BaseRequest, generation: Generation, *, show: Callable[[list[TextOutput]], Any], begun: Begun
) -> web.StreamResponse:
    """Answer a request. `show`: makes the body. Raises ApiError before anything is sent."""
    time_s = asyncio.get_running_loop().time
    answers, response = dict(generation.resumed), None
    frames, due_s = WholeFrames(begun, answers), time_s() + FRAMES_EVERY_S
    try:
        while not generation.done:
            for index, output in await generation.next():
                add(answers, index, output)
            if time_s() >= due_s and not generation.done:
                response = response or await open_stream(request, headers={"Content-Type": FRAMES_TYPE})
                await response.write(frames.news(answers))
                due_s = time_s() + FRAMES_EVERY_S
    except ApiError as error:
        if response is None:
            raise
        body = errors_of(request).response(error).body
        assert isinstance(body, bytes)
        return await _ended(response, failed_frame(error.status, error.retry_after_s) + body)
    if generation.moved:
        response = response or await open_stream(request, headers={"Content-Type": FRAMES_TYPE})
        return await _ended(response, frames.leave(answers, generation.moved))
    shown = show([answers[i] for i in range(len(generation.samples))])
    return json_response(shown) if response is None else await _ended(response, _encode(shown))


async def _ended(response: web.StreamResponse, rest: bytes) -> web.StreamResponse:
    await response.write(rest)
    await response.write_eof()
    return response
