"""Measures the longest silence of 16 streams while one body of megabytes is read, tokenized, refused or answered.

A router, a prefill and a decode worker on this machine. Streams go through the router, and so does one body after the other, then the same
to each worker directly where that is possible. Beside them a short request comes every 0.3 s. The client shares the cores. What else runs
on the machine only adds silence, so of several rounds the least counts; the rows without a body show what is left of it.
"""

import asyncio
import base64
import gzip
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import aiohttp
import requests

from benchmarks.cluster import tandem_up
from benchmarks.measures import Row, Tables, tell

BESIDE_EVERY_S = 0.3
SETTLE_S = 0.5  # before a body and after its answer
ALONE_S = 10.0
TIMEOUT_S = 300.0
STREAM_TOKENS = 2000


@dataclass
class Body:
    """`data`: as sent. `straight`: it also goes to the workers themselves. `once`: its prompts take minutes to compute."""

    name: str
    path: str
    fields: InitVar[dict[str, Any]]
    zipped: bool = False
    straight: bool = False
    once: bool = False
    data: bytes = field(init=False)

    def __post_init__(self, fields: dict[str, Any]) -> None:
        data = json.dumps({"model": "default", **fields}).encode()
        self.data = gzip.compress(data) if self.zipped else data


def bodies(megabytes: int) -> list[Body]:
    """Each kind of body, of `megabytes` where the kind says nothing else."""
    size = megabytes * 1_000_000
    text = "hello world " * (size // 12)
    message = {"role": "user", "content": "hi"}
    noise = base64.b64encode(random.Random(1).randbytes(size // 2 * 3 // 4)).decode()
    complete, chat = "/v1/completions", "/v1/chat/completions"
    return [
        Body("text", complete, {"prompt": text}, straight=True),
        Body("text to tokenize", "/tokenize", {"prompt": text}),
        Body("text to tokenize, 6 MB", "/tokenize", {"prompt": text[:6_000_000]}),
        Body("6 MB to count", "/v1/messages/count_tokens", {"messages": [{**message, "content": text[:6_000_000]}]}),
        Body("token ids", complete, {"prompt": [12345] * (size // 7)}, straight=True),
        Body("token ids, 14 MB", complete, {"prompt": [12345] * 2_000_000}, straight=True),
        Body("ids to detokenize, 7 MB", "/detokenize", {"tokens": [12345] * 1_000_000}),
        Body("200,000 messages", chat, {"messages": [message] * 200_000}, straight=True),
        Body("50,000 messages", chat, {"messages": [message] * 50_000}),
        Body("parts of a message", chat, {"messages": [{**message, "content": [{"type": "text", "text": "h"}] * 80_000}]}),
        Body("names of fields", complete, {"prompt": "h", **{f"z{i}": i for i in range(250_000)}}),
        Body("image", chat, {"messages": [{**message, "content": [{"type": "image_url", "image_url": {"url": text}}]}]}),
        Body("conversation to store", "/v1/responses", {"input": text}),
        Body("gzip, 45 MB in 44 kB", complete, {"prompt": "a" * 45_000_000}, zipped=True, straight=True),
        Body("gzip, of noise", complete, {"prompt": noise}, zipped=True, straight=True),
        Body("score, 4,096 items", "/v1/score", {"query": "Is it red? ", "items": ["A rose."] * 4096, "label_token_ids": [5, 6]}, once=True),
        Body("score, query of 400 kB", "/v1/score", {"query": text[:400_000], "items": ["x"] * 4096, "label_token_ids": [5, 6]}),
        Body("rerank, 400 kB", "/v1/rerank", {"query": "red", "documents": ["a rose is a rose " * 6] * 4000}, once=True),
    ]  # fmt: skip


@dataclass
class Watched:
    """Streams through a router, in a loop of its own thread. `times_s`: of each stream's events, in turn."""

    url: str
    num_streams: int
    times_s: dict[int, list[float]] = field(default_factory=dict)
    others: list[tuple[int, float, float]] = field(default_factory=list)  # status, begin, seconds
    over: threading.Event = field(default_factory=threading.Event)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [self._again(self._stream, session) for _ in range(self.num_streams)]
            await asyncio.gather(*tasks, self._again(self._other, session))

    async def _again(self, ask: Callable[[aiohttp.ClientSession], Any], session: aiohttp.ClientSession) -> None:
        while not self.over.is_set():
            with suppress(aiohttp.ClientError, TimeoutError):
                await ask(session)

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        body = {"model": "default", "prompt": "Once", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        times = self.times_s[next(self.numbers)] = list[float]()
        async with session.post(self.url + "/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
                if self.over.is_set():
                    return

    async def _other(self, session: aiohttp.ClientSession) -> None:
        begin = time.monotonic()
        body = {"model": "default", "prompt": "Hi", "max_tokens": 1}
        async with session.post(self.url + "/v1/completions", json=body) as response:
            await response.read()
            self.others.append((response.status, begin, time.monotonic() - begin))
        await asyncio.sleep(BESIDE_EVERY_S)

    def silence_s(self, begin: float, end: float) -> float:
        """The longest time between two events of a stream that overlaps with these times."""
        pairs = (pair for times in list(self.times_s.values()) for pair in itertools.pairwise(list(times)))
        return max((b - a for a, b in pairs if b > begin and a < end), default=end - begin)

    def forget(self) -> None:
        """Keep the streams' last events alone."""
        for times in list(self.times_s.values()):
            del times[:-1]
        self.others.clear()


def send(url: str, body: Body) -> int:
    """Return the status of the answer; 0: the body was refused before all of it was sent."""
    headers = {"Content-Type": "application/json", **({"Content-Encoding": "gzip"} if body.zipped else {})}
    try:
        return requests.post(url + body.path, data=body.data, headers=headers, timeout=TIMEOUT_S).status_code
    except requests.RequestException:
        return 0


def _nothing() -> int:
    time.sleep(ALONE_S)
    return 0


def _row(watched: Watched, name: str, to: str, work: Callable[[], int], *, rounds: int = 1) -> Row:
    """The round with the least silence."""
    rows = []
    for _ in range(rounds):
        time.sleep(SETTLE_S)
        watched.forget()
        begin = time.monotonic()
        status = work()
        taken_s = time.monotonic() - begin
        time.sleep(SETTLE_S)
        rows.append((watched.silence_s(begin, begin + taken_s), taken_s, status, list(watched.others)))
    silence_s, taken_s, status, others = min(rows)
    tell(f"{name} {to}", silence_s=silence_s, taken_s=taken_s, status=status)
    failed = sum(answered != 200 for answered, _, _ in others)
    return {
        "body": name,
        "to": to,
        "status": status or None,
        "answered after, s": taken_s,
        "longest silence of a stream, s": silence_s,
        "slowest other, s": max((took_s for _, _, took_s in others), default=0.0),
        "others failed": failed or None,
    }


def measure(
    *, streams: int = 16, megabytes: int = 30, rounds: int = 3, only: tuple[str, ...] = (), model: str = "smollm2"
) -> Tables:
    """`only`: names of bodies; (): all."""
    with tandem_up("--model-path", model) as cluster:
        watched = Watched(cluster.url, streams)
        thread = threading.Thread(target=lambda: asyncio.run(watched.run()))
        thread.start()
        try:
            begin = time.monotonic()
            while sum(map(bool, watched.times_s.values())) < streams:
                time.sleep(0.1)
                assert time.monotonic() < begin + TIMEOUT_S, "the streams did not begin"
            rows = [_row(watched, "no body", "", _nothing)]
            for body in bodies(megabytes):
                if not only or body.name in only:
                    targets = [("router", cluster.url), *(cluster.workers if body.straight else ())]
                    own = 1 if body.once else rounds
                    rows += [_row(watched, body.name, to, partial(send, url, body), rounds=own) for to, url in targets]
            rows.append(_row(watched, "no body", "", _nothing))
        finally:
            watched.over.set()
            thread.join()
    return {"": rows}
