"""What long prompts do to short requests beside them: who is answered, how soon, and how long tokens stand still.

usage: python -m benchmarks.busy [--checkpoint DIR] [--unified] [--long-tokens 4000] [--worker-flags "--max-step-time 0"] [--output FILE]

A random checkpoint with the layers of Qwen3-0.6B, one thread a worker: a prefill step of 1,024 tokens takes seconds on a slow CPU.
Three prompts of 4,000 tokens (--long-tokens) come first, then 30 short requests, one each `--gap` seconds. Every request streams.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.cluster import tandem_up
from benchmarks.random_model import write_model
from deploy.bench import environment

NUM_LONG, LONG_TOKENS = 3, 4000
NUM_SHORT, SHORT_TOKENS = 30, 60
NEW_TOKENS = 16
TOKEN_IDS = (16, 272)
TIMEOUT_S = 900.0


@dataclass
class Answer:
    """`error`: "" for one that came whole. `token_s`: when tokens came, from the request on."""

    kind: str
    error: str = ""
    token_s: list[float] = field(default_factory=list)


async def ask(http: aiohttp.ClientSession, url: str, kind: str, prompt: list[int], after_s: float) -> Answer:
    await asyncio.sleep(after_s)
    answer, begun_s = Answer(kind), time.monotonic()
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    try:
        async with http.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if b'"error"' in line:
                    answer.error = line.decode(errors="replace")[:200]
                elif line.startswith(b"data: {"):
                    answer.token_s.append(time.monotonic() - begun_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    return answer


async def run(url: str, *, gap_s: float, long_tokens: int, seed: int) -> list[Answer]:
    draw = random.Random(seed)
    kinds = [("long", long_tokens, 0.0)] * NUM_LONG
    kinds += [("short", SHORT_TOKENS, gap_s * number) for number in range(1, NUM_SHORT + 1)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
        tasks = [ask(http, url, kind, [draw.randrange(*TOKEN_IDS) for _ in range(n)], s) for kind, n, s in kinds]
        return await asyncio.gather(*tasks)


def summary(answers: list[Answer]) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": Counter(a.error for a in answers if a.error)}
    for kind in ("long", "short"):
        whole = [a for a in answers if a.kind == kind and not a.error]
        first = sorted(a.token_s[0] for a in whole)
        gaps = sorted(b - a for answer in whole for a, b in zip(answer.token_s, answer.token_s[1:], strict=False))
        found[kind] = {
            "asked": sum(a.kind == kind for a in answers),
            "answered": len(whole),
            "ttft_s": [round(part, 2) for part in (first[len(first) // 2], first[-1])] if first else None,
            "longest_gap_s": round(gaps[-1], 2) if gaps else None,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy")
    parser.add_argument("--checkpoint", default="", help="default: a new random one")
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("--long-tokens", type=int, default=LONG_TOKENS)
    parser.add_argument("--gap", type=float, default=1.0)
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    with ExitStack() as stack:
        model = Path(args.checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-busy-")))
        if not (model / "config.json").exists():
            write_model(model)
        flags = ["--model-path", str(model), "--num-threads", "1", "--max-total-tokens", "16384"]
        shape = ["--unified"] if args.unified else []
        cluster = stack.enter_context(tandem_up(*shape, *flags, *args.worker_flags.split()))
        answers = asyncio.run(run(cluster.url, gap_s=args.gap, long_tokens=args.long_tokens, seed=0))
    report = {"environment": environment.describe(), "arguments": vars(args), **summary(answers)}
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
