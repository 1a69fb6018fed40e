"""Time to the first token where a prefix comes from another prefill worker, and where it is computed: by length of the prompt.

usage: python -m benchmarks.prefix_fetch [--tokens 256 1024 8192] [--rounds 5] [--layers 4] [--backend nixl] [--output FILE]

Prefill workers with --prefix-fetch and a decode worker; this program is their router. One has each prompt cached, the others nothing:

    computed   no source is named
    fetched    the source is named to a worker that has never computed a prompt, and so always fetches
    chosen     ... to the one that computes the others: --prefix-fetch compares costs; "fetches" of how many rounds it chose so

With `--layers` the model is a random one of that many layers of Qwen3-0.6B's shape; without, the shipped one (a KiB of KV a token).
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from tests.e2e.cluster import SECRET, Started, tandem

FLAGS = ("--port", "0", "--max-total-tokens", "65536", "--num-threads", "1", "--log-level", "warning")
WAYS = ("computed", "fetched", "chosen")


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


async def measure(cluster: Cluster, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    await cluster.read()
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    chosen: dict[int, int] = defaultdict(int)
    for worker in (
        cluster.source,
        cluster.fetcher,
        cluster.chooser,
    ):  # handshakes, without a prompt that measures anything
        await cluster.first_token(cluster.source, _prompt(-1, 40))
        await cluster.first_token(worker, _prompt(-1, 40), named=worker is not cluster.source)
    for number, length in tqdm([(n, length) for n in range(rounds) for length in lengths], unit="prompt"):
        prompt = _prompt(number, length)
        _, right = await cluster.first_token(cluster.source, prompt)
        for way in WAYS:
            worker = cluster.fetcher if way == "fetched" else cluster.chooser
            for at in (worker, cluster.decode):
                await cluster.forget(at)
            before = await cluster.fetched(worker)
            ms, tokens = await cluster.first_token(worker, prompt, named=way != "computed")
            came = await cluster.fetched(worker) > before
            assert tokens == right, (way, length)
            assert came or way != "fetched", f"{length} tokens did not come"
            chosen[length] += came and way == "chosen"
            times[length, way].append(ms)
    return [
        {"tokens": n, "fetches": chosen[n], **{f"{way}_ms": statistics.median(times[n, way]) for way in WAYS}}
        for n in lengths
    ]


def _prompt(number: int, length: int) -> list[int]:
    draw = random.Random(f"{number}/{length}")
    return [1, *(draw.randrange(16, 512) for _ in range(length - 1))]


async def run(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    model: tuple[str, ...] = ()
    if args.layers:
        write_model(folder / "model", layers=args.layers)
        model = ("--model-path", str(folder / "model"))
    with started(folder, model, args.backend) as (prefill, decode):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
            return await measure(Cluster(http, prefill, decode), args.tokens, args.rounds)


def render(result: dict[str, Any]) -> str:
    rows = [
        [str(row["tokens"]), *(f"{row[f'{way}_ms']:.0f}" for way in WAYS), f"{row['fetches']} of {result['rounds']}"]
        for row in result["rows"]
    ]
    return table(["tokens", *(f"{way}, ms" for way in WAYS), "fetches"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 8192, 30000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="0: the shipped model")
    parser.add_argument("--backend", default="nixl", choices=("nixl", "mooncake"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-prefix-") as folder:
        rows = asyncio.run(run(Path(folder), args))
    what = {"layers": args.layers, "backend": args.backend, "rounds": args.rounds}
    result = {"environment": environment.describe(), **what, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
