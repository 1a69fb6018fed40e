"""Measures a pair of prefill and decode worker beside a unified worker: TTFT, running answers beside prompts, ranks."""

import asyncio
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import requests

from benchmarks.cluster import Cluster, load, load_records, pin, tandem_up
from benchmarks.cpu_use import cpu_use
from benchmarks.measures import Row, Tables, in_turns
from benchmarks.peer_loads import SEED_STEP, Server, interference, warm_up
from benchmarks.random_model import write_model
from deploy.bench.stats import Summary
from disagg.outgoing import KEPT

BACKENDS = ("nixl", "mooncake")


@contextmanager
def random_model(**shape: int) -> Iterator[str]:
    """Write a random checkpoint; its folder."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_model(Path(folder), **shape)
        yield folder


# ---- what a pair costs

PROMPT_LENS = (64, 512, 2048)
TRANSFER = re.compile(r"^sglang:kv_transfer_latency_ms(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
BUSY = {"concurrency": 8, "input_len": 256, "output_len": 64}


def measure_overhead(*, requests: int = KEPT, backends: Sequence[str] = BACKENDS) -> Tables:
    """Prompts are random token ids, so nothing is cached. `requests`: of each length; the transfer is that of the last 64."""
    alone, busy = list[Row](), list[Row]()
    for backend in backends:
        with tandem_up("--unified") as unified, tandem_up("--transfer-backend", backend) as pair:
            for length in PROMPT_LENS:
                shape = {"concurrency": 1, "input_len": length, "output_len": 8, "num_requests": requests}
                one, two = load(url=unified.url, compare=pair.url, prompt="ids", **shape)
                alone.append(_adds(f"{backend}, {length} tokens", one, two, transfer_ms(pair)))
            one, two = load(url=unified.url, compare=pair.url, prompt="ids", num_requests=4 * requests, **BUSY)
            busy += [{"8 at once, 256 in, 64 out": "unified"} | _latencies(one)]
            busy += [{"8 at once, 256 in, 64 out": f"pd, {backend}"} | _latencies(two)]
    return {"": alone, "Under load:": busy}


def measure_checksums(*, requests: int = 32, layers: int = 4, lengths: Sequence[int] = (512, 2048)) -> Tables:
    """Two pairs, one without checksums; `requests` of each length, to both in turns."""
    rows = list[Row]()
    with random_model(layers=layers) as model:
        flags = ("--model-path", model)
        with tandem_up(*flags, "--no-disaggregation-kv-checksum") as bare, tandem_up(*flags) as pair:
            for length in lengths:
                shape = {"concurrency": 1, "input_len": length, "output_len": 2, "num_requests": requests}
                one, two = load(url=bare.url, compare=pair.url, prompt="ids", **shape)
                assert one.ttft_s is not None and two.ttft_s is not None
                row: Row = {"prompt": f"{length} tokens", "TTFT p50 without, ms": 1e3 * one.ttft_s.p50}
                row |= {"with, ms": 1e3 * two.ttft_s.p50, "ratio": two.ttft_s.p50 / one.ttft_s.p50}
                rows.append(row | {"transfer without, ms": transfer_ms(bare), "transfer with, ms": transfer_ms(pair)})
    return {"": rows}


def _adds(name: str, unified: Summary, pair: Summary, moved_ms: float) -> Row:
    assert unified.ttft_s is not None and pair.ttft_s is not None
    one, two = 1e3 * unified.ttft_s.p50, 1e3 * pair.ttft_s.p50
    row: Row = {"one request at a time, TTFT p50": name, "unified, ms": one, "PD, ms": two, "PD adds, ms": two - one}
    return row | {"transfer, ms": moved_ms, "beyond it, ms": two - one - moved_ms}


def transfer_ms(pair: Cluster) -> float:
    """Return the mean hand-over of the last `KEPT` requests, as the prefill worker measures it.

    It begins with the last chunk (or decode's word where it goes, if that comes later) and ends when all has landed.
    """
    url = dict(pair.workers)["prefill"]
    found = TRANSFER.search(requests.get(f"{url}/metrics", timeout=10.0).text)
    assert found is not None, "the prefill worker says nothing of its transfers"
    return float(found[1])


def _latencies(summary: Summary) -> Row:
    assert summary.ttft_s is not None and summary.itl_s is not None
    ttft, itl = summary.ttft_s, summary.itl_s
    row: Row = {"TTFT p50, ms": 1e3 * ttft.p50, "TTFT p99": 1e3 * ttft.p99}
    return row | {"ITL p50, ms": 1e3 * itl.p50, "ITL p99": 1e3 * itl.p99, "output tok/s": summary.output_tokens_per_s}


# ---- running answers beside prompts

PREFILL_CORE, DECODE_CORE = 0, 1


def measure_interference(*, rounds: int = 3, backend: str = "nixl", layers: int = 28) -> Tables:
    """Workload C of peer_loads.py, and its long decodes alone. A unified worker has two threads on both cores.

    In a pair each worker's processes are pinned to a core; the router and this client share the prefill worker's.
    """
    everywhere, rows = os.sched_getaffinity(0), list[Row]()
    with random_model(layers=layers) as model:
        flags = ("--model-path", model)
        with tandem_up("--unified", "--num-threads", "2", *flags) as cluster:
            rows += _beside_prompts("unified, two threads", cluster, Path(model).name, rounds)
        with tandem_up("--transfer-backend", backend, *flags) as cluster:
            pin(cluster, {"prefill": (PREFILL_CORE,), "decode": (DECODE_CORE,), "router": (PREFILL_CORE,)})
            os.sched_setaffinity(0, {PREFILL_CORE})
            try:
                rows += _beside_prompts("prefill | decode, a core each", cluster, Path(model).name, rounds)
            finally:
                os.sched_setaffinity(0, everywhere)
    return {"": rows}


def _beside_prompts(name: str, cluster: Cluster, model: str, rounds: int) -> list[Row]:
    server = Server(url=cluster.url, model=model)
    asyncio.run(warm_up(server))
    seeds = iter(range(SEED_STEP, 1000 * SEED_STEP, SEED_STEP))

    def sample(prompts: bool) -> dict[str, float]:
        with cpu_use() as used:
            found = asyncio.run(interference(server, seed=next(seeds), prompts=prompts))
        return {**found, "cores_left": used.cores_left}

    ways: dict[str, Callable[[], dict[str, float]]] = {
        "alone": partial(sample, False),
        "prompts come": partial(sample, True),
    }
    rows = []
    found = in_turns(ways, rounds)
    for way, one in found.items():
        row: Row = {"4 long decodes": f"{name}, {way}", "ITL p50, ms": one["itl_p50_ms"], "p99": one["itl_p99_ms"]}
        row |= {"max": one["itl_max_ms"], "tok/s": one["output_tok_s"], "cores left": one["cores_left"]}
        if way != "alone":
            row |= {"prompts' TTFT p50, ms": one["ttft_p50_ms"]}
            row |= {"p99, over alone": one["itl_p99_ms"] / found["alone"]["itl_p99_ms"]}
        rows.append(row)
    return rows


# ---- ranks

RANKS = {
    "one thread": ("--num-threads", "1"),
    "two threads": ("--num-threads", "2"),
    "--tp-size 2": ("--tp-size", "2", "--num-threads", "1"),
    "--pp-size 2": ("--pp-size", "2", "--num-threads", "1"),
}


def measure_ranks(*, rounds: int = 3, layers: int = 28, long: int = 4096) -> Tables:
    """One unified worker for each way, all on this machine, asked in turns: only one computes at a time."""
    with random_model(layers=layers) as model, ExitStack() as stack:
        common = ("--unified", "--model-path", model, "--max-total-tokens", "32768", "--disable-radix-cache")
        urls = {name: stack.enter_context(tandem_up(*common, *flags)).url for name, flags in RANKS.items()}
        found = in_turns({name: partial(_ranks, url, long) for name, url in urls.items()}, rounds)
    base = found["two threads"]
    return {
        "": [
            {"way (beside two threads)": name, **{key: f"{v:.1f} ({v / base[key]:.2f})" for key, v in one.items()}}
            for name, one in found.items()
        ]
    }


def _ranks(url: str, long: int) -> dict[str, float]:
    def ask(num: int, at_once: int, length: int, output: int) -> Any:
        shape = {"num_requests": num, "concurrency": at_once, "input_len": length, "output_len": output}
        return load_records(url=url, prompt="ids", warmup=0, seed=random.getrandbits(30), **shape)[0].records

    one, eight, lone = ask(2, 1, 64, 24), ask(8, 8, 64, 24), ask(1, 1, long, 2)
    gaps = [1e3 * median(gap for record in records for gap in record.itl_s) for records in (one, eight)]
    ttfts = [1e3 * median(record.ttft_s for record in records) for records in (one, lone)]
    return {"ITL of 1, ms": gaps[0], "of 8": gaps[1], "TTFT of 64 tokens, ms": ttfts[0], f"of {long}": ttfts[1]}
