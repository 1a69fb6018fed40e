"""One run of the bench, from config to result."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import aiohttp
import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from deploy.bench.config import BenchConfig
from deploy.bench.load import Measured, Target, run_in_turns, run_load
from deploy.bench.stats import RequestRecord, Summary, ratio_table, ratios, summarize, summary_table
from deploy.bench.workload import BenchRequest, make_requests, read_trace
from deploy.openai_api import first_model

# ---- A measurement's environment: hardware, versions, commit, command.

DISTRIBUTIONS = (
    "tandem-serve",
    "torch",
    "nixl-cu12",
    "nixl-cu13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "aiohttp",
    "triton",
)
COMMAND_TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(_without_directories(arg) for arg in sys.argv),
        "commit": commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "gpu": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
    }


def commit() -> str | None:
    """Return the source tree's commit ("+changes" if modified)."""
    root = str(ROOT)
    found = _said("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if not found:
        return None
    return found + ("+changes" if _said("git", "-C", root, "status", "--porcelain", "--untracked-files=no") else "")


def _without_directories(argument: str) -> str:
    """Hide absolute paths."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _said(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- run


async def measure(config: BenchConfig) -> list[Measured]:
    """Warm up, then load one target, or two in turns."""
    requests = make_requests(config, read_trace(config.trace) if config.trace else ())
    async with open_session(config.api_key) as session:
        targets = [
            Target(url, session=session, config=config, model=config.model or await first_model(session, url))
            for url in config.urls
        ]
        for target in targets:
            await run_load(target.send, _warmup(requests, config.warmup), concurrency=1)
        with tqdm(total=len(requests) * len(targets), unit="req", disable=config.disable_progress or None) as bar:
            return await run_in_turns(
                [target.send for target in targets],
                requests,
                rounds=config.rounds if len(targets) > 1 else 1,
                concurrency=config.concurrency,
                on_done=_Progress(bar),
            )


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, connect=30),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        trust_env=False,
        read_bufsize=1 << 20,
    )


def print_report(urls: Sequence[str], measured: Sequence[Measured]) -> list[Summary]:
    summaries = [summarize(one.records, duration_s=one.duration_s) for one in measured]
    for url, one, summary in zip(urls, measured, summaries, strict=True):
        print(f"\n{url}\n\n{summary_table(summary)}")
        for line in _error_examples(one.records):
            print(line)
    if len(urls) == 2:
        print("\n" + ratio_table(ratios(*summaries), first=urls[0], second=urls[1]))
    return summaries


def result_json(config: BenchConfig, measured: Sequence[Measured], summaries: Sequence[Summary]) -> bytes:
    """Return the result with all records, without API key."""
    targets = [
        {"url": url, "summary": summary, "records": one.records}
        for url, summary, one in zip(config.urls, summaries, measured, strict=True)
    ]
    result = {
        "environment": describe() | ({"command": "tandem bench (with an API key)"} if config.api_key else {}),
        "config": asdict(config) | {"api_key": None},
        "targets": targets,
        "ratios": ratios(*summaries) if len(summaries) == 2 else None,
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=1)


class _Progress:
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar
        self._errors = 0

    def __call__(self, record: RequestRecord) -> None:
        if record.error:
            self._errors += 1
            self._bar.set_postfix(errors=self._errors, refresh=False)
        self._bar.update()


def _warmup(requests: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """Return requests with other prompts, to cache nothing measured."""
    return [_reversed(request) for request in requests[:count]]


def _reversed(request: BenchRequest) -> BenchRequest:
    words = request.prompt
    prompt = " ".join(reversed(words.split())) if isinstance(words, str) else tuple(reversed(words))
    return BenchRequest(idx=-1, prompt=prompt, prompt_len=request.prompt_len, output_len=min(request.output_len, 4))


def _error_examples(records: Sequence[RequestRecord]) -> list[str]:
    first: dict[str, RequestRecord] = {}
    for record in records:
        if record.error:
            first.setdefault(record.error, record)
    return [f"{kind}, e.g. request {record.idx}: {record.detail}" for kind, record in sorted(first.items())]
