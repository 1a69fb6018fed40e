"""Measures the time to the first token where a prefix comes from another prefill worker, and where it is computed."""

import asyncio
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.measures import Measure, Row, Tables, tell
from benchmarks.random_model import write_model
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from tests.e2e.cluster import SECRET, Started, tandem

FLAGS = ("--port", "0", "--max-total-tokens", "65536", "--num-threads", "1", "--log-level", "warning")
WAYS = ("computed", "fetched", "chosen")


def measure(
    *,
    tokens: Sequence[int] = (256, 512, 1024, 2048, 8192, 30000),
    rounds: int = 5,
    layers: int = 0,
    backend: str = "nixl",
) -> Tables:
    """`tokens`: lengths of prompts. `layers`: of a random model in the shape of Qwen3-0.6B; 0: the shipped one."""
    with tempfile.TemporaryDirectory(prefix="tandem-prefix-") as name:
        model: tuple[str, ...] = ()
        if layers:
            write_model(Path(name, "model"), layers=layers)
            model = ("--model-path", str(Path(name, "model")))
        with started(Path(name), model, backend) as (prefill, decode):
            return {"": asyncio.run(_run(prefill, decode, tokens, rounds))}


async def _run(prefill: list[Started], decode: Started, tokens: Sequence[int], rounds: int) -> list[Row]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        cluster = Cluster(http, prefill, decode)
        await cluster.read()
        for worker in prefill:  # handshakes, without a prompt that measures anything
            await cluster.first_token(cluster.source, _prompt(-1, 40))
            await cluster.first_token(worker, _prompt(-1, 40), named=worker is not cluster.source)
        times: dict[tuple[int, str], list[float]] = defaultdict(list)
        chosen: dict[int, int] = defaultdict(int)
        for number in range(rounds):
            for length in tokens:
                chosen[length] += await _prompt_each_way(cluster, _prompt(number, length), times)
    found = {length: {f"{way}, ms": median(times[length, way]) for way in WAYS} for length in tokens}
    return [{"tokens": length, **of, "fetches": f"{chosen[length]} of {rounds}"} for length, of in found.items()]


async def _prompt_each_way(cluster: "Cluster", prompt: list[int], times: dict[tuple[int, str], list[float]]) -> bool:
    """Note what the first token took; return whether the worker that chooses has fetched."""
    _, right = await cluster.first_token(cluster.source, prompt)
    has_chosen = False
    for way in WAYS:
        worker = cluster.fetcher if way == "fetched" else cluster.chooser
        for at in (worker, cluster.decode):
            await cluster.forget(at)
        before = await cluster.fetched(worker)
        ms, tokens = await cluster.first_token(worker, prompt, named=way != "computed")
        came = await cluster.fetched(worker) > before
        assert tokens == right, (way, len(prompt))
        assert came or way != "fetched", f"{len(prompt)} tokens did not come"
        has_chosen |= came and way == "chosen"
        times[len(prompt), way].append(ms)
        tell(f"{len(prompt)} tokens, {way}", ms=ms)
    return has_chosen


def _prompt(number: int, length: int) -> list[int]:
    draw = random.Random(f"{number}/{length}")
    return [1, *(draw.randrange(16, 512) for _ in range(length - 1))]


@contextmanager
def started(folder: Path, model: tuple[str, ...], backend: str) -> Iterator[tuple[list[Started], Started]]:
    with ExitStack() as stack:

        def serve(name: str, role: str, *flags: str) -> Started:
            flags = ("--disaggregation-mode", role, "--disaggregation-transfer-backend", backend, *flags, *model)
            return stack.enter_context(tandem(folder / name, "serve", *FLAGS, *flags))

        prefill = ("--disaggregation-bootstrap-port", "0", "--prefix-fetch")
        yield [serve(f"p{i}", "prefill", *prefill) for i in range(3)], serve("d", "decode")


class Cluster:
    """`source` has the prompts, `fetcher` never computes one, `chooser` does."""

    def __init__(self, http: aiohttp.ClientSession, prefill: list[Started], decode: Started) -> None:
        self.http = http
        self.source, self.fetcher, self.chooser = prefill
        self.decode = decode
        self.infos: dict[str, dict[str, Any]] = {}

    async def read(self) -> None:
        for worker in (self.source, self.fetcher, self.chooser):
            async with self.http.get(f"{worker.url}/server_info") as answer:
                self.infos[worker.url] = await answer.json()

    async def first_token(self, worker: Started, prompt: list[int], *, named: bool = False) -> tuple[float, list[int]]:
        """(milliseconds until the first token, the tokens)."""
        info = self.infos[worker.url]
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": info["disaggregation_bootstrap_port"],
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        headers = {PREFIX_HEADER: self._source(len(prompt))} if named else {}
        began_s = time.perf_counter()
        computing = asyncio.ensure_future(self._post(worker, body, headers))
        first_s, tokens = 0.0, list[int]()
        async with self.http.post(f"{self.decode.url}/generate", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - began_s
                    tokens = json.loads(line[6:])["output_ids"]
        await computing
        return first_s * 1e3, tokens

    def _source(self, num_tokens: int) -> str:
        at = json.loads(self.infos[self.source.url]["prefix_source"])
        named = PrefixSourceHeader(control=at["control"], incarnation=at["incarnation"], num_tokens=num_tokens)
        return write_header(named, SECRET.encode())

    async def _post(self, worker: Started, body: dict[str, Any], headers: dict[str, str]) -> None:
        async with self.http.post(f"{worker.url}/generate", json=body, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()

    async def forget(self, worker: Started) -> None:
        """Its prefixes. A worker that is not idle yet refuses."""
        deadline_s = time.monotonic() + 10
        while True:
            async with self.http.post(f"{worker.url}/flush_cache") as answer:
                if answer.ok:
                    return
                assert time.monotonic() < deadline_s, await answer.text()
            await asyncio.sleep(0.02)

    async def fetched(self, worker: Started) -> int:
        async with self.http.get(f"{worker.url}/metrics") as answer:
            text = await answer.text()
        lines = [line for line in text.splitlines() if line.startswith("tandem_num_prefix_fetched_total")]
        return sum(int(float(line.split()[-1])) for line in lines)


MEASURES = {
    "prefix_fetch": Measure(
        title="Prefixes of other workers",
        about="Time to the first token of a prompt that one prefill worker has cached and another one does not, by its length; the shipped model (a "
        "KiB of KV a token), prefill and decode on this one machine, over NIXL. *Chosen*: by `--prefix-fetch`, which compares costs. Each "
        "answer's tokens are compared.",
        run=measure,
        quick={"rounds": 1, "tokens": [512]},
    )
}
