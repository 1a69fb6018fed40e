"""Workers with a drafter are lost under streams: the prompt is retried, the answer goes on, and its tokens and drafts are as before.

The drafter is right, and reads hidden states: where a page came without its tail, or an answer went on without it, drafts are wrong.
"""

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.client import session, text_of
from tests.e2e.cluster import POLL_S, SETTLE_S, Started, several, tandem
from tests.e2e.failover.test_failover import DELAY_S, KV, SLOW, Fleet, busy, events_of, failovers, kill
from tests.e2e.settings import settings
from tests.e2e.workload import recall_prompt
from tests.models.recall_drafters import build
from tools.recall.oracle import continuation

NEW, FAULT_AFTER = 400, 4  # tokens; events, of up to five tokens each: far more than half of a stream follows
RNG = random.Random(9)
PROMPTS = [recall_prompt(RNG, 40 + i) for i in range(2)]
RIGHT = [continuation(prompt, NEW, ignore_eos=True) for prompt in PROMPTS]
BODIES: list[dict[str, Any]] = [
    {"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0}}
    for prompt in PROMPTS
]


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Fleet]:
    """Two prefill and two decode workers with one drafter."""
    drafter = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", build("EAGLE", tmp_path / "eagle"))
    flags = ("serve", "--port", "0", "--model-path", WIDE_MODEL_PATH, *SLOW, *KV, *drafter, "--disaggregation-mode")
    prefill, decode = (*flags, "prefill", "--disaggregation-bootstrap-port", "0"), (*flags, "decode")
    with several(
        tmp_path, {"p0": prefill, "p1": prefill, "d0": decode, "d1": decode}, settings(stream_delay_s=DELAY_S)
    ) as workers:
        route = ["--pd-disaggregation"]
        for name, worker in workers.items():
            route += ["--prefill" if name.startswith("p") else "--decode", worker.url]
        with tandem(tmp_path / "r", "router", "--port", "0", *route) as router:
            yield Fleet(router.url, [workers["d0"], workers["d1"]], [workers["p0"], workers["p1"]], ())


async def asked_prefill(pairs: Fleet) -> Started:
    """The prefill worker that computes a prompt, by the router's word."""
    while True:
        told = json.loads(await text_of(f"{pairs.router}/dashboard/state"))
        sent = {worker["url"] for worker in told["workers"] if worker["inflight_requests"]}
        for worker in pairs.prefill:
            if worker.url in sent:
                return worker
        await asyncio.sleep(POLL_S / 5)


@pytest.mark.slow
async def test_a_drafted_stream_outlives_its_prefill_and_its_decode_worker(pairs: Fleet) -> None:
    counts = [0] * len(BODIES)
    for worker in pairs.prefill:  # so that no first token comes before the fault
        worker.child("scheduler").send_signal(signal.SIGSTOP)
    async with session() as http, asyncio.timeout(SETTLE_S):
        load = asyncio.gather(
            *(events_of(http, f"{pairs.router}/generate", body, counts, i) for i, body in enumerate(BODIES))
        )
        lost = await asked_prefill(pairs)
        kill(lost)
        (left,) = [worker for worker in pairs.prefill if worker is not lost]
        left.child("scheduler").send_signal(signal.SIGCONT)
        while min(counts) < FAULT_AFTER:
            await asyncio.sleep(POLL_S / 5)
        kill(busy(pairs))
        events = await load
    assert [one[-1]["output_ids"] for one in events] == RIGHT
    assert (await failovers(pairs.router)).get("went_on", 0) > 0
    for info in (one[-1]["meta_info"] for one in events):
        own = info["spec_verify_ct"] + info["spec_accept_token_num"]
        assert 1 < info["spec_accept_length"] == 1 + info["spec_accept_token_num"] / info["spec_verify_ct"] <= 5
        assert info["spec_accept_token_num"] == info["spec_draft_token_num"] > 0, "a draft was wrong"
        assert own <= NEW - 1 == info["completion_tokens"] - 1
    assert min(i["spec_verify_ct"] + i["spec_accept_token_num"] for i in (e[-1]["meta_info"] for e in events)) < NEW - 1
