"""Time to the first token of a prompt with a long prefix, by where the prefix lies: nowhere, on the device, host or disk.

usage: python -m benchmarks.hierarchical_cache [--prefix 2048] [--repeats 5] [--layers 8] [--model-path DIR] [--output FILE]

The whole engine in this process, no HTTP; a random checkpoint with the layers of Qwen3-0.6B unless one is named. Each
repeat has a prefix of its own. "disk" reads files that were just written: from the kernel's page cache, not the medium.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.random_model import write_model
from deploy.bench.environment import describe
from deploy.bench.report import table
from engine.build import EngineParts, build_engine
from engine.config import EngineConfig
from engine.core.request import Request
from engine.model_files.model_config import load_model_config
from engine.sampling_params import SamplingParams

PAGE_SIZE = 16
TIERS = ("recomputed", "device", "host", "disk")


class Engine:
    """One engine, one request at a time."""

    def __init__(self, model_path: str, *, prefix: int, folder: str) -> None:
        model = load_model_config(model_path)
        config = EngineConfig(
            model_path=model_path,
            page_size=PAGE_SIZE,
            max_total_tokens=2 * prefix,
            context_length=2 * prefix,
            enable_hierarchical_cache=True,
            hicache_ratio=3.0,
            hicache_storage_backend="file",
            hicache_storage_dir=folder,
            hicache_storage_prefetch_policy="wait_complete",
        )
        self._ended = threading.Event()
        self.parts: EngineParts = build_engine(config, model, progress=False, wakeup=self._ended.set)
        self._count = 0

    def ttft_s(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds from the arrival to the first token, and what each tier gave (tokens of device, host, disk)."""
        self._count += 1
        request = Request(
            rid=str(self._count),
            input_ids=prompt,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            eos_ids=frozenset(),
            arrived_s=0.0,
        )
        begin = time.perf_counter()
        self.parts.scheduler.add(request)
        while not request.output_ids:
            self._turn_or_rest()
        elapsed_s = time.perf_counter() - begin
        self._settle()
        return elapsed_s, request.cached_by_tier

    def _turn(self) -> bool:
        if self.parts.disk is not None:
            self.parts.disk.turn()
        plan = self.parts.scheduler.schedule(time.monotonic())
        if plan is not None:
            launch = self.parts.device.executor.launch(plan)
            self.parts.scheduler.collect(plan, self.parts.device.executor.collect(launch))
        return plan is not None

    def _settle(self) -> None:
        """Until the files are written."""
        host = self.parts.scheduler.memory.host
        assert host is not None
        while host.asks_for_a_step or any(map(host.pages.is_pinned, range(host.pages.num_pages))):
            self._turn_or_rest()

    def _turn_or_rest(self) -> None:
        """As the loop: without a step it sleeps until the disk threads have done something."""
        self._ended.clear()
        if not self._turn():
            self._ended.wait(0.02)

    def close(self) -> None:
        if self.parts.disk is not None:
            self.parts.disk.close()
        self.parts.device.executor.close()


def measure(model_path: str, *, prefix: int, repeats: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}

    def prompt() -> list[int]:
        return [rng.randrange(16, 272) for _ in range(prefix + 1)]

    with tempfile.TemporaryDirectory(prefix="tandem-hicache-") as folder:
        engine = Engine(model_path, prefix=prefix, folder=folder)
        engine.ttft_s(prompt())  # warm up
        for _ in tqdm(range(repeats), unit="prefix"):
            asked = prompt()
            found = {"recomputed": engine.ttft_s(asked), "device": engine.ttft_s(asked)}
            engine.ttft_s(prompt())
            engine.ttft_s(prompt())  # two others push it out of the device
            found["host"] = engine.ttft_s(asked)
            engine.parts.scheduler.forget_prefixes()  # all but the files
            found["disk"] = engine.ttft_s(asked)
            for at, tier in enumerate(TIERS):
                elapsed_s, tokens = found[tier]
                assert at == 0 or tokens[at - 1] > 0.9 * prefix, f"{tier}: the prefix came from elsewhere: {tokens}"
                seconds[tier].append(elapsed_s)
        engine.close()
    return [
        {"prefix": tier, "ttft_p50_ms": 1000 * statistics.median(s), "ttft_max_ms": 1000 * max(s)}
        for tier, s in seconds.items()
    ]


def render(report: dict[str, Any]) -> str:
    rows = [[r["prefix"], f"{r['ttft_p50_ms']:.1f}", f"{r['ttft_max_ms']:.1f}"] for r in report["rows"]]
    title = f"Prefix of {report['prefix_tokens']} tokens, {report['page_bytes'] * report['pages'] / 1e6:.0f} MB of KV"
    return f"{title}\n\n" + table(["prefix", "TTFT p50 ms", "TTFT max ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the prefix")
    parser.add_argument("--repeats", type=int, default=5, help="prefixes")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random checkpoint")
    parser.add_argument("--model-path", help="a checkpoint instead")
    parser.add_argument("--output", help="write the JSON here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        path = args.model_path or folder
        if not args.model_path:
            write_model(Path(folder), layers=args.layers)
        rows = measure(path, prefix=args.prefix, repeats=args.repeats)
        model = load_model_config(path)
    page_bytes = 2 * model.num_kv_heads * model.head_dim * 2 * model.num_layers * PAGE_SIZE
    report = {
        "environment": describe(),
        "prefix_tokens": args.prefix,
        "pages": args.prefix // PAGE_SIZE,
        "page_bytes": page_bytes,
        "rows": rows,
    }
    print(render(report))
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
