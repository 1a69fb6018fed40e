"""Clients that ask without pause, of which some leave; every answer is compared with the oracle of the shipped model."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.workload import recall_body
from tools.faults.load import judge

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
