"""Bytes of KV that change on their way, by real engines and memory: such requests fail alone, and no answer is wrong."""

import random
from collections.abc import Callable, Sequence

import pytest

from disagg import transfers
from disagg.metadata import PendingChecksum
from engine.assembly.parts import EngineParts
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.two_engines import disaggregated, turning
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation
from transfer_backends.contract import Tail

NEW, PROMPT = 8, 70
Damage = Callable[[EngineParts, Sequence[int]], None]  # of these pages in a worker's pool


def flip(parts: EngineParts, pages: Sequence[int]) -> None:
    """One bit of one byte."""
    rng, pool = random.Random(pages[0]), parts.pool
    pool.buffer[rng.choice(pages[:-1]) * pool.page_bytes + rng.randrange(pool.unit_end)] ^= 1 << rng.randrange(8)


def _copy(parts: EngineParts, source: int, target: int) -> None:
    pages = parts.pool.buffer.view(-1, parts.pool.page_bytes)
    pages[target] = pages[source].clone()


def swap(parts: EngineParts, pages: Sequence[int]) -> None:
    pool = parts.pool.buffer.view(-1, parts.pool.page_bytes)
    pool[list(pages[:2])] = pool[[pages[1], pages[0]]]


def stay_old(parts: EngineParts, pages: Sequence[int]) -> None:
    """A page was not written: page 0 is what it had before."""
    _copy(parts, 0, pages[1])


def use_again(parts: EngineParts, pages: Sequence[int]) -> None:
    """Another request of the worker has written the page before it was read."""
    _copy(parts, pages[0], pages[2])


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_each_damage_fails_its_own_request(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's before it compares, prefill's between its sum and its write."""
    compute, turn = transfers._checksum, {"prefill": 0, "decode": 0}
    damages: dict[str, list[Damage | None]] = {
        "decode": [flip, None, swap, None, stay_old, flip, None, None],
        "prefill": [None, None, None, None, None, None, use_again, None],
    }

    def checksum_of(parts: EngineParts, wakeup: Callable[[], None]) -> Callable[..., PendingChecksum]:
        checksum, mode = compute(parts, wakeup), "decode" if len(made) else "prefill"
        made.append(mode)

        def damaged(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> PendingChecksum:
            damage = damages[mode][turn[mode]]
            turn[mode] += 1
            before = checksum(pages, tail, num_tokens)() if mode == "prefill" else None
            if damage is not None:
                damage(parts, pages)
            return checksum(pages, tail, num_tokens) if mode == "decode" else lambda: before

        return damaged

    made = list[str]()
    monkeypatch.setattr(transfers, "_checksum", checksum_of)
    flags = {"disaggregation_transfer_backend": backend, "disaggregation_layerwise_transfer": "off"}
    rng = random.Random(3)
    prompts = [recall_prompt(rng, PROMPT) for _ in damages["decode"]]
    with disaggregated(DEFAULT_MODEL_PATH, decode={}, max_total_tokens=4096, disagg=flags) as pair:
        decode = pair.workers[1]
        for i, prompt in enumerate(prompts):
            pair.submit(f"r{i}", prompt, new=NEW)
            for _ in turning(pair.workers):
                pass
        bad = {f"r{i}" for i, whom in enumerate(zip(*damages.values(), strict=True)) if any(whom)}
        assert (
            {rid for rid in decode.aborted if "KV was corrupted" in decode.aborted[rid]} == bad == set(decode.aborted)
        )
        for i, prompt in enumerate(prompts):
            if f"r{i}" not in bad:
                assert decode.tokens[f"r{i}"] == continuation(prompt, NEW, ignore_eos=True)
        counters = decode.role.counters()
        assert (counters["kv_checksum_failed"], counters["kv_checksum_verified"]) == (len(bad), len(prompts) - len(bad))
