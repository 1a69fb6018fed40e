"""Retained streams: a router resumes them after a broken connection (service/http/reconnect.py)."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import Response

from engine.frontend.apis.shared.resumable import NOT_SIGNED, check_signed, resume_of
from engine.frontend.apis.shared.routes import RouteTags, post_route
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES
from service.http.api import ApiRouter
from service.http.errors import ApiError, decode_body, decode_or_none
from service.http.reconnect import KEEP_HEADER, RETAINED_PATH, Keep, RetainedQuestion, StreamLog
from service.http.request import HttpRequest
from service.http.resume import Begun, Resume, begin_frame, is_signed, known_frames
from service.http.routes import REQUEST_ID, json_response

API = ApiRouter(RouteTags.OPERATIONS)


@contextmanager
def retained(request: HttpRequest, generation: Generation, begun: Begun) -> Iterator[StreamLog]:
    """Retain an SSE stream for the router that requests it. Raises ApiError(403)."""
    s, loop = request[SERVICES], asyncio.get_running_loop()
    stream = log_of(
        generation,
        keep=keep_of(request.headers[KEEP_HEADER], s.spec.secret),
        tag=secrets.token_hex(8),
        request_id=request[REQUEST_ID],
        head=head_of(begun, resume_of(request)),
    )
    s.kept.open(stream)
    try:
        yield stream
    finally:
        s.kept.ended(stream, loop.time())
        loop.call_later(stream.keep.window_s, lambda: s.kept.forget_old(loop.time()))


def keep_of(header: str, secret: bytes | None) -> Keep:
    """Raises ApiError(403) if unsigned."""
    signature, _, text = header.partition(" ")
    keep: Keep | None = decode_or_none(text.encode(), Keep)
    if keep is None or not is_signed(signature, secret, text.encode()):
        raise ApiError(403, f"{KEEP_HEADER}: {NOT_SIGNED}")
    return keep


def head_of(begun: Begun, resume: Resume | None) -> bytes:
    return begin_frame(begun) if resume is None else known_frames(resume)


def log_of(generation: Generation, *, keep: Keep, tag: str, request_id: str, head: bytes) -> StreamLog:
    """A client that fetches the rest ends the generation."""
    taken = ApiError(409, "the client has asked for the rest of this stream again", code="stream_resumed")
    return StreamLog(tag=tag, request_id=request_id, keep=keep, head=head, end=partial(generation.fail, taken))


@API.on(post_route, RETAINED_PATH, is_alias=True)  # for routers
async def kept_stream(request: HttpRequest) -> Response:
    """Answer a router. Raises ApiError: 403 for another caller, 404 for an unknown stream."""
    s, data = request[SERVICES], await request.read()
    check_signed(request, data)
    question = decode_body(data, RetainedQuestion)
    rest = s.kept.rest(question, asyncio.get_running_loop().time())
    if rest is not None:
        return json_response(rest)
    elsewhere = await s.others.kept(question)
    if not elsewhere:
        raise ApiError(404, "no such stream is kept here")
    return Response(content=elsewhere[0], media_type="application/json")
