"""Conversations of several turns, whose pairs a test chooses as a router does that knows where the earlier turns lie."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from tests.e2e.client import generate, session, text_of
from tests.e2e.cluster import Worker
from tests.e2e.workload import pairs
from tools.recall.oracle import continuation

PAGE = 64  # at most
MOST_TALKS = 6  # a machine that is busy may fetch nothing in time, and one that is fast computes the less
ROOMS = random.Random(11)


@dataclass(frozen=True)
class Turn:
    """`prompt`: history, then what is new."""

    prompt: list[int]
    answer: list[int]

    @property
    def known(self) -> int:
        """Tokens whose KV decode has computed: not that of the last one."""
        return len(self.prompt) + len(self.answer) - 1


def conversation(seed: int, *, first: int = 600, words: int = 40, new: int = 150, circle: int = 200) -> list[Turn]:
    """Three turns about a circle of facts: each turn goes on where the answer before it ended, and so does its own answer."""
    bos, *facts = pairs(random.Random(f"turns {seed}"), circle)
    found, prompt = list[Turn](), [bos, *(facts * 2)[: first - 1]]
    for _ in range(3):
        found.append(Turn(prompt, continuation(prompt, new, ignore_eos=True)))
        history = [*prompt, *found[-1].answer]
        prompt = [bos, *(facts * 9)[: len(history) - 1 + words]]
        assert prompt[: len(history)] == history
    return found


async def ask_pair(
    prefill: Worker,
    decode: Worker,
    turn: Turn,
    *,
    known: int,
    secret: bytes,
    source: Worker | None = None,
    lora: str | None = None,
) -> dict[str, Any]:
    """What decode answers; prefill is told that `source`, by default decode, has `known` tokens."""
    source = source or decode
    infos = {worker: json.loads(await text_of(f"{worker.url}/server_info")) for worker in (prefill, source)}
    sampling = {"temperature": 0, "max_new_tokens": len(turn.answer), "ignore_eos": True}
    body = {
        "input_ids": turn.prompt,
        "sampling_params": sampling,
        "lora_path": lora,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": infos[prefill]["disaggregation_bootstrap_port"],
        "bootstrap_room": ROOMS.getrandbits(60) + 1,
    }
    at = json.loads(infos[source]["prefix_source"])
    named = PrefixSourceHeader(control=at["control"], incarnation=at["incarnation"], num_tokens=max(1, known))
    headers = {PREFIX_HEADER: write_header(named, secret)} if known else {}
    async with session() as http:
        answers = await asyncio.gather(_posted(http, prefill.url, body, headers), generate(http, decode.url, body))
    return answers[1]


async def _posted(http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with http.post(f"{url}/generate", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()


async def assert_found_again(prefill: Sequence[Worker], decode: Worker, *, secret: bytes) -> None:
    """Each turn goes to the next prefill worker: answers are right, and from the second turn on only what is new is computed."""
    for seed in range(MOST_TALKS):
        known, lacks = 0, list[int]()
        for i, turn in enumerate(conversation(seed)):
            answer = await ask_pair(prefill[i % len(prefill)], decode, turn, known=known, secret=secret)
            assert answer["output_ids"] == turn.answer
            lacks.append(known - answer["meta_info"]["cached_tokens"])
            known = turn.known
        if max(lacks[1:]) < PAGE:
            return
    raise AssertionError(f"tokens of earlier turns were computed again: {lacks}")
