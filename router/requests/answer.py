"""An answer on its way to the client: relayed until its end, or the failure of its worker."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed, circuit_blamed
from router.requests.merge import Merger
from router.requests.relay import (
    HANDED_BACK,
    JSON,
    FilteredStream,
    StreamSplitter,
    answer_headers,
    draining,
    failure_error,
    relay_stream,
)
from service.http.resume import FrameRecord
from service.http.routes import errors_of


@dataclass(eq=False)
class ClientAnswer:
    """The answer of `attempt`, with prefill's part by `mergers`.

    It ends with its worker; a subclass may continue it elsewhere, and then changes `attempt`.
    """

    launcher: AttemptLauncher
    request: RequestContext
    attempt: PairAttempt
    mergers: Sequence[Merger] = ()

    async def whole(self) -> web.StreamResponse:
        """Return an answer that does not stream."""
        return self._respond(self.attempt.answering.reply.take())

    async def stream(self) -> web.StreamResponse:
        request, reply = self.request, self.attempt.answering.reply
        try:
            self._follow()
            splitter = self._splitter()
            headers = {**answer_headers(reply.headers), "Cache-Control": "no-cache"}
            out = await request.client.open(request.http, status=reply.status, headers=headers)
            if request.events_first:
                await out.write(request.events_first)
            failure = await self._relay(out, splitter)
            while (lost := failure or self._incomplete()) and not request.handed_back:
                failure = lost
                if not await self._goes_on(lost):
                    break
                splitter.restart()
                failure = await self._relay(out, splitter)
            return await self._end(out, failure)
        finally:
            self._close()

    def _follow(self) -> None:
        """Watch the calls of a new attempt."""
        self.attempt.watch_prefill(self.launcher.on_call_failed)

    def _incomplete(self) -> CallFailed | None:
        """Return why an orderly end is incomplete."""
        return None

    async def _goes_on(self, failure: CallFailed) -> bool:
        """Report the failure; return whether a new attempt continues the answer."""
        if not self.attempt.refused:  # reported before
            self.launcher.on_call_failed(failure)
        return False

    def _close(self) -> None:
        """Release what the answer holds, in the end."""

    def _splitter(self, record: FrameRecord | None = None) -> StreamSplitter:
        kind = self.attempt.answering.reply.headers["content-type"]
        filters = [merger.merge_events for merger in self.mergers]
        filters += [part.on_events for part in self.request.answer_parts]
        return FilteredStream(kind, filters, record=record) if filters else StreamSplitter(kind, record=record)

    def _relay(self, out: web.StreamResponse, splitter: StreamSplitter) -> Awaitable[CallFailed | None]:
        request, attempt = self.request, self.attempt
        request.cut = attempt.answering.reply.close
        on_more = _reporter(request, attempt)
        return relay_stream(request.http, out, attempt.answering, splitter=splitter, on_more=on_more)

    async def _end(
        self, out: web.StreamResponse, failure: CallFailed | None, last_event: bytes = b""
    ) -> web.StreamResponse:
        """End the client's stream, perhaps with an error: `last_event` of the worker, else ours."""
        request, attempt = self.request, self.attempt
        await request.client.end()
        failure = attempt.refused or failure
        if request.handed_back:
            request.failure, error, last_event = HANDED_BACK, draining(HANDED_BACK), b""
        elif failure:
            request.failure, error = str(failure), failure_error(failure)
        else:
            await out.write_eof()
            self._complete()
            return out
        attempt.close()
        await out.write(last_event or errors_of(request.http).last_event(error))  # without [DONE]
        await out.write_eof()
        return out

    def _respond(self, body: bytes) -> web.Response:
        request, call = self.request, self.attempt.answering
        for part in request.answer_parts:
            body = part.on_answer(body)
        self._complete()
        for merger in self.mergers:
            body = merger.merge_answer(body)
        headers = answer_headers(call.reply.headers) | (JSON if call.framed else {})
        return web.Response(status=call.reply.status, body=body, headers=headers)

    def _complete(self) -> None:
        self.attempt.complete()
        circuit_blamed(self.request, self.attempt, self.launcher.clock())


def _reporter(request: RequestContext, attempt: PairAttempt) -> Callable[[bytes], None]:
    """Return the receiver of an answer's chunks after the first."""
    on_chunk, clock = attempt.launcher.events.on_chunk, attempt.launcher.clock

    def on_more(chunk: bytes) -> None:
        now_s = clock()
        for notify in on_chunk:
            notify(request, attempt, chunk, now_s)
        request.last_byte_s = now_s
        request.num_chunks += 1

    return on_more
