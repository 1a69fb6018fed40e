"""Schedules requests: closed loop, open loop, or two targets in turns."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from msgspec import structs

from deploy.bench.config import BenchConfig
from deploy.bench.stats import RequestRecord
from deploy.bench.workload import BenchRequest
from deploy.openai_api import DONE, SseParser, StreamChunk, StreamFailed, decode_event, text_of

Send = Callable[..., Awaitable[RequestRecord]]  # (request, *, started_at) -> Record
OnDone = Callable[[RequestRecord], None]
One = Callable[[BenchRequest], Coroutine[None, None, None]]


@dataclass
class Measured:
    """A target's records, and its seconds under load."""

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0


async def run_load(
    send: Send, requests: Sequence[BenchRequest], *, concurrency: int, on_done: OnDone = lambda record: None
) -> Measured:
    """Send requests at their times, else `concurrency` at once."""
    started_at = time.perf_counter()
    measured = Measured()

    async def one(request: BenchRequest) -> None:
        record = await send(request, started_at=started_at)
        measured.records.append(record)
        on_done(record)

    if requests and requests[0].at_s is not None:
        await _open_loop(one, requests, started_at=started_at)
    else:
        await _closed_loop(one, requests, concurrency=concurrency)
    measured.duration_s = time.perf_counter() - started_at
    return measured


async def run_in_turns(
    sends: Sequence[Send], requests: Sequence[BenchRequest], *, rounds: int, concurrency: int, on_done: OnDone
) -> list[Measured]:
    """Put equal shares of the requests on each target in turn.

    That cancels drift (heat, neighbours); the order alternates. Times count from the run's start.
    """
    started_at = time.perf_counter()
    totals = [Measured() for _ in sends]
    for number, share in enumerate(shares(requests, rounds)):
        order = list(range(len(sends)))
        for target in order if number % 2 == 0 else reversed(order):
            turn_s = time.perf_counter() - started_at
            part = await run_load(sends[target], share, concurrency=concurrency, on_done=on_done)
            totals[target].records += [structs.replace(one, sent_s=one.sent_s + turn_s) for one in part.records]
            totals[target].duration_s += part.duration_s
    return totals


def shares(requests: Sequence[BenchRequest], rounds: int) -> list[list[BenchRequest]]:
    """Cut into nearly equal parts with times from 0."""
    bounds = [len(requests) * i // rounds for i in range(rounds + 1)]
    return [_restarted(requests[a:b]) for a, b in itertools.pairwise(bounds) if a < b]


def _restarted(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    first = requests[0].at_s
    return [r if r.at_s is None or first is None else replace(r, at_s=r.at_s - first) for r in requests]


async def _closed_loop(one: One, requests: Sequence[BenchRequest], *, concurrency: int) -> None:
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await one(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())


async def _open_loop(one: One, requests: Sequence[BenchRequest], *, started_at: float) -> None:
    async with asyncio.TaskGroup() as group:
        for request in requests:
            delay_s = started_at + (request.at_s or 0.0) - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            group.create_task(one(request))


DETAIL_CHARS = 300


class Target:
    """A server under test; requests share `session`.

    Sends and times one OpenAI request. Errors are counted, not raised. Tokens are the server's
    `usage`, else text events.
    """

    def __init__(self, url: str, *, session: aiohttp.ClientSession, config: BenchConfig, model: str) -> None:
        self._endpoint = url.rstrip("/") + ("/v1/chat/completions" if config.api == "chat" else "/v1/completions")
        self._session = session
        self._config = config
        self._model = model

    async def send(self, request: BenchRequest, *, started_at: float) -> RequestRecord:
        """Send a request and read its answer. `started_at`: the run's start."""
        sent_at = time.perf_counter()
        record = RequestRecord(idx=request.idx, sent_s=sent_at - started_at)
        if request.at_s is not None:
            record.late_s = max(0.0, record.sent_s - request.at_s)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._exchange(request, record, sent_at)
        except StreamFailed as error:
            record.error, record.detail = error.kind, str(error)[:DETAIL_CHARS]
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "disconnect", f"{type(error).__name__}: {error}"[:DETAIL_CHARS]
        record.e2e_s = time.perf_counter() - sent_at
        return record

    async def _exchange(self, request: BenchRequest, record: RequestRecord, sent_at: float) -> None:
        async with self._session.post(self._endpoint, json=self.body(request)) as reply:
            if reply.status != 200:
                raise StreamFailed(f"http {reply.status}", (await reply.text(errors="replace")))
            if self._config.stream:
                await _read_stream(reply, record, sent_at)
            else:
                _note(record, decode_event(await reply.read()))

    def body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_len,
            "temperature": self._config.temperature,
        }
        if self._config.ignore_eos:  # so that special tokens also make events
            body |= {"ignore_eos": True, "skip_special_tokens": False}
        if self._config.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._config.api == "chat":
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"prompt": request.prompt}


async def _read_stream(reply: aiohttp.ClientResponse, record: RequestRecord, sent_at: float) -> None:
    parser, last_at, finished = SseParser(), None, False
    async for chunk in reply.content.iter_any():
        now = time.perf_counter()
        for data in parser.feed(chunk):
            if data == DONE:
                if record.ttft_s is None:
                    raise StreamFailed("empty answer", "the stream brought no text")
                return
            event = decode_event(data)
            finished = finished or any(choice.finish_reason for choice in event.choices)
            if not _note(record, event):
                continue
            if last_at is None:
                record.ttft_s = now - sent_at
            else:
                record.itl_s.append(now - last_at)
            last_at = now
    if not (finished and last_at is not None):  # `transformers serve` sends a finish_reason, but no [DONE]
        raise StreamFailed("cut short", "the stream ended without [DONE]")


def _note(record: RequestRecord, event: StreamChunk) -> bool:
    has_text = any(text_of(choice) for choice in event.choices)
    if event.usage is not None:
        record.prompt_tokens = event.usage.prompt_tokens
        record.output_tokens = event.usage.completion_tokens or 0
        details = event.usage.prompt_tokens_details
        record.cached_tokens = (details.cached_tokens or 0) if details else 0
    elif has_text:
        record.output_tokens += 1
    return has_text
