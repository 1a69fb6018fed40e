"""Requests whose answers are known, and how each ended, in one word: those of a cell, and clients that ask without pause."""

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from tests.e2e.workload import pairs, recall_body
from tools.recall.oracle import continuation

TIMEOUT = aiohttp.ClientTimeout(total=180)
PAIRS = 60  # of a prompt


@dataclass
class Outcome:
    """`end`: right | wrong | error (a message came) | cut (the connection broke) | hangs. `at_s`, `events_s`: monotonic times; of a
    stream's events, else empty."""

    end: str
    at_s: float
    detail: str = ""
    events_s: Sequence[float] = ()

    def silence_s(self, since_s: float) -> float:
        """The longest that the client of a stream heard nothing from `since_s` on; 0 for a whole answer."""
        times = [since_s, *(at_s for at_s in self.events_s if at_s > since_s)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


class Load:
    """`count` requests at the router, of which half stream. `begun`: set once each stream has begun."""

    def __init__(self, url: str, *, count: int, new_tokens: int, seed: int) -> None:
        self._url, self._new_tokens = url, new_tokens
        self._waiting = {i for i in range(count) if _streams(i)}
        self.begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._one(i, seed)) for i in range(count)]

    @property
    def is_over(self) -> bool:
        return all(task.done() for task in self._tasks)

    def add(self, seed: int) -> None:
        """One more, short and not streaming."""
        self._tasks.append(asyncio.create_task(self._one(0, seed, new_tokens=4)))

    async def outcomes(self, within_s: float) -> list[Outcome]:
        """All of them; those that have not ended in time hang, and are cancelled."""
        _, late = await asyncio.wait(self._tasks, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        now_s = time.monotonic()
        return [Outcome("hangs", now_s) if task in late else task.result() for task in self._tasks]

    async def leave(self) -> None:
        """All clients go away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, i: int, seed: int, new_tokens: int | None = None) -> Outcome:
        count = new_tokens or self._new_tokens
        body, _ = recall_body(random.Random(f"{seed}/{i}"), PAIRS)
        body["sampling_params"] |= {"max_new_tokens": count, "ignore_eos": True}
        body["stream"] = _streams(i)
        events_s: list[float] = []
        try:
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as http,
                http.post(f"{self._url}/generate", json=body) as response,
            ):
                end, detail = await self._read(i, response, body, count, events_s)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            end, detail = "cut", f"{type(error).__name__}: {error}"
        return Outcome(end, time.monotonic(), detail, events_s)

    async def _read(
        self, i: int, response: aiohttp.ClientResponse, body: dict[str, Any], count: int, events_s: list[float]
    ) -> tuple[str, str]:
        whole = b""
        async for chunk in response.content.iter_any():
            whole += chunk
            if response.status == 200:
                if body["stream"]:
                    events_s.append(time.monotonic())
                self._waiting.discard(i)
                if not self._waiting:
                    self.begun.set()
        return judge(response.status, whole, body["input_ids"], count)


def _streams(i: int) -> bool:
    """One of two, and not every second one: a router gives those to one of two workers."""
    return (i + i // 2) % 2 == 1


def judge(status: int, whole: bytes, prompt: Sequence[int], count: int) -> tuple[str, str]:
    """How an answer ended, and the message if it is an error.

    An event of a stream shows the tokens of the one before and more, several where the worker was busy.
    """
    text = whole.decode(errors="replace")
    last = text.strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2]
    try:
        answer = json.loads(last)
    except ValueError:
        return "wrong", f"status {status}: {text[-200:]!r} is no answer"
    if "error" in answer:
        return ("error", answer["error"]["message"]) if answer["error"].get("message") else ("wrong", last)
    finish = answer.get("meta_info", {}).get("finish_reason") or {}
    if finish.get("type") == "abort":
        return "error", str(finish.get("message"))
    if status != 200 or answer.get("output_ids") != continuation(prompt, count, ignore_eos=True):
        return "wrong", last[-200:]
    counts = [len(json.loads(event)["output_ids"]) for event in text.split("data: ")[1:] if event.startswith("{")]
    if bad := [pair for pair in pairwise(counts) if pair[0] >= pair[1]]:
        return "wrong", f"an event of {bad[0][1]} tokens follows one of {bad[0][0]}"
    return "right", ""


class Hog:
    """One request that may grow until it fills decode's pool. Decode gives no other request pages while it runs."""

    def __init__(self, url: str, *, pool_tokens: int, seed: int) -> None:
        ids = pairs(random.Random(seed), 20)
        self._url = url
        sampling = {"max_new_tokens": pool_tokens - len(ids) - 64, "ignore_eos": True, "temperature": 0}
        self._body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        self.begun = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as http,
            http.post(f"{self._url}/generate", json=self._body) as response,
        ):
            async for _ in response.content.iter_any():
                self.begun.set()

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            await self._task


# ---- clients that ask without pause, of which some leave

SLOW_S = 120.0
BACK_OFF_S = 0.05


@dataclass(frozen=True)
class Mix:
    """What is asked. `aborts`: the share of clients that leave, within `abort_s`; `adapted`: of requests to an adapter "steady"."""

    at_once: int
    most_pairs: int
    most_new: int
    aborts: float
    abort_s: float
    adapted: float = 0.0


@dataclass
class Traffic:
    """`more`: whether another request is sent. `url`: where it goes. `judged`, asked as it begins: a word for its end."""

    mix: Mix
    rng: random.Random
    more: Callable[[], bool]
    url: Callable[[random.Random], str]
    judged: Callable[[str], Callable[[str], str]] = lambda url: lambda end: end
    on_end: Callable[[], object] = lambda: None
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    begun: int = 0

    async def run(self, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._client(http) for _ in range(self.mix.at_once)))

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while self.more():
            self.begun += 1
            began_s = time.monotonic()
            end, detail = await self._one(http, random.Random(self.rng.random()))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.ends[end] += 1
            if end in ("wrong", "hangs", "cut"):
                self.wrong.append(f"{end}: {detail}"[:400])
            elif end not in ("right", "left"):
                self.errors[_class_of(detail)] += 1
                await asyncio.sleep(BACK_OFF_S)
            self.on_end()

    async def _one(self, http: aiohttp.ClientSession, rng: random.Random) -> tuple[str, str]:
        mix = self.mix
        body, _ = recall_body(rng, rng.randint(5, mix.most_pairs))
        body["sampling_params"] |= {"max_new_tokens": rng.randint(1, mix.most_new), "ignore_eos": True}
        body["stream"] = rng.random() < 0.5
        if rng.random() < mix.adapted:
            body["lora_path"] = "steady"
        task = asyncio.create_task(self._ask(http, self.url(rng), body))
        if rng.random() < mix.aborts:
            await asyncio.wait({task}, timeout=rng.random() * mix.abort_s)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return "left", ""
        return await task

    async def _ask(self, http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, str]:
        judged = self.judged(url)
        try:
            async with asyncio.timeout(SLOW_S), http.post(f"{url}/generate", json=body) as response:
                whole = await response.read()
            end, detail = judge(response.status, whole, body["input_ids"], body["sampling_params"]["max_new_tokens"])
        except TimeoutError:
            return "hangs", f"no end within {SLOW_S:g} s"
        except (aiohttp.ClientError, ConnectionError) as error:
            end, detail = "cut", f"{type(error).__name__}: {error}"
        return judged(end), detail


def _class_of(detail: str) -> str:
    """A message without its addresses and numbers."""
    return re.sub(r"\d+", "N", re.sub(r"http://\S+", "URL", detail))[:160]


def session() -> aiohttp.ClientSession:
    """Of any number of connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
