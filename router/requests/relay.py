"""Passes a worker's event stream to the client, chunk by chunk as it comes. Knows nothing of workers or retries."""

from collections.abc import Callable, Mapping

from aiohttp import web

from router.client.upstream import UpstreamError
from router.requests.legs import Leg, LegError, broken_stream
from router.requests.merge import SseMerger
from router.requests.sse import SseSplitter
from service.http.stream import open_stream


class StreamBroken(Exception):
    """The worker's stream ended early, after bytes went to the client. `out` takes one more event, then ends."""

    def __init__(self, out: web.StreamResponse, cause: LegError) -> None:
        super().__init__(str(cause))
        self.out, self.cause = out, cause


async def relay_stream(
    request: web.BaseRequest,
    leg: Leg,
    *,
    headers: Mapping[str, str],
    merger: SseMerger | None,
    on_first: Callable[[bytes], None],
    on_more: Callable[[bytes], None],
) -> web.StreamResponse:
    """Send the leg's answer to the client until it ends; the caller ends the response (`write_eof`).

    `on_first` is told what came first, `on_more` each further piece. `StreamBroken` if the worker broke off; the client's own
    connection errors pass.
    """
    out = await open_stream(request, status=leg.reply.status, headers=headers)
    splitter = SseSplitter()
    feed = merger.feed if merger else splitter.feed
    read = leg.reply.readany
    chunk = leg.reply.take()
    on_first(chunk)
    while chunk:
        events = feed(chunk)
        if events:
            await out.write(events)
        try:
            chunk = await read()
        except UpstreamError as err:
            raise StreamBroken(out, broken_stream(leg.worker, err)) from None
        if chunk:
            on_more(chunk)
    rest = merger.rest() if merger else splitter.rest()
    if rest:
        await out.write(rest)
    return out


async def end_with_event(out: web.StreamResponse, event: bytes) -> web.StreamResponse:
    """The last event of a stream that broke; no [DONE] follows, so that no client takes it for a good end."""
    await out.write(event)
    await out.write_eof()
    return out
