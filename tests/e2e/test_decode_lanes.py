"""A decode worker with --enable-pdmux: KV of peers, its own prompts and answers in one memory, over real NIXL."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.probe import free_ports
from tests.e2e.client import generate, left_over, session, wait_for_state
from tests.e2e.cluster import several
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import tokens_of

FLAGS = ("--port", "0", "--max-total-tokens", "65536", "--chunked-prefill-size", "128", "--log-level", "warning")


@pytest.mark.slow
async def test_prompts_of_its_own_and_kv_of_peers_give_the_same_tokens(qwen3: str, tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    bodies = mixed_bodies(seed=5, count=32)
    flags = {
        "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port),
        "decode": ("--disaggregation-mode", "decode", "--enable-pdmux", "--pdmux-itl", "0.05"),
    }
    commands = {role: ("serve", *FLAGS, "--model-path", qwen3, *own) for role, own in flags.items()}
    with several(tmp_path, commands) as workers:
        async with session() as http:

            async def answer(number: int, body: dict[str, Any]) -> list[int]:
                """Every other one of a pair."""
                url = workers["decode"].url
                if number % 2:
                    return (await generate(http, url, body))["output_ids"]  # type: ignore[no-any-return]
                halves = {
                    **body,
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": int(port),
                    "bootstrap_room": 1 + number,
                }
                _, found = await asyncio.gather(*(generate(http, worker.url, halves) for worker in workers.values()))
                return found["output_ids"]  # type: ignore[no-any-return]

            answers = await asyncio.gather(*(answer(number, body) for number, body in enumerate(bodies)))
        for worker in workers.values():
            await wait_for_state(worker.url, lambda state: left_over(state) is None)
    assert list(answers) == tokens_of(qwen3, bodies, max_total_tokens=65536)
