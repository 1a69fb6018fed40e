"""A model with recurrent states served by two workers: the tokens of one engine, over every transfer engine, however memory runs out."""

from typing import Any

import pytest

from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.state_slots import StateSlots
from tests.e2e.two_engines import disaggregated, next_turn, run
from tests.engine.drafts.drafters import draft_from
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

SYSTEM = prompt_of(150, 9)
PROMPTS = [
    *(SYSTEM + prompt_of(40 + 7 * i, i) for i in range(5)),
    prompt_of(64, 20),
    prompt_of(3, 21),
    prompt_of(300, 22),
]
NEW = 24
ASKED = [(f"r{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS)]
FLAGS: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 128, "stream": "threaded", "stream_delay_s": 0.0003}
TIGHT = {"max_total_tokens": 900, "schedule_conservativeness": 0.0}  # some of the requests at their ends
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # flags of the transfer, of decode
    "nixl": ({}, {}),
    "nixl by layers": ({"disaggregation_layerwise_transfer": "on"}, {}),
    "host": (
        {"disaggregation_decode_retraction_backup": "host", "disaggregation_transfer_backend": "mooncake"},
        TIGHT,
    ),
    "recompute": ({}, TIGHT),
    "prefill": ({"disaggregation_decode_retraction_backup": "prefill"}, TIGHT),
    "host tier": ({}, {**TIGHT, "enable_hierarchical_cache": True, "hicache_ratio": 4.0}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


@pytest.fixture(scope="module")
def right(checkpoint: str) -> dict[str, list[int]]:
    """One engine at depth 1 that caches nothing, each prompt whole."""
    with EngineInProcess(checkpoint, page_size=16, chunked_prefill_size=-1, disable_radix_cache=True) as engine:
        for rid, prompt, new in ASKED:
            engine.add(rid, prompt, max_new_tokens=new)
        engine.run()
        return engine.tokens


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_give_the_tokens_of_one(way: str, checkpoint: str, right: dict[str, list[int]]) -> None:
    transfer, decode = WAYS[way]
    with disaggregated(checkpoint, decode=decode, disagg=transfer, max_total_tokens=8192, **FLAGS) as pair:
        assert run(pair, ASKED, turns_between=6) == right
        again = [(f"again {rid}", prompt, new) for rid, prompt, new in ASKED]
        tiered = pair.workers[1].parts.scheduler.memory.part(HostCache)
        together = None if tiered is None else 0  # else decode would take no step, and copy no page
        answers = run(pair, again, turns_between=6, together=together)
        assert tiered is None or tiered.counted["hicache_host_hit_tokens"] > 0
        assert [answers[rid] for rid, _, _ in again] == [right[rid] for rid, _, _ in ASKED]
        prefill, last = (worker.parts.scheduler for worker in pair.workers)
        states = prefill.memory.part(StateSlots)
        assert states is not None and states.num_snapshots > 0
        assert prefill.counters.cached_tokens >= 128 * len(PROMPTS[:5])
        assert (last.counters.retractions > 0) == bool(decode)
        for scheduler in (prefill, last):
            scheduler.check()
            states = scheduler.memory.part(StateSlots)
            assert states is not None and states.allocator.counts()["held"] == 0


@pytest.mark.parametrize("backup", ["host", "recompute"])
def test_states_that_landed_go_back_behind_wrong_drafts(
    backup: str, checkpoint: str, right: dict[str, list[int]]
) -> None:
    """Slots of states on decode are written by the peer, passed by drafts, copied to the host or lost, and given to the next request."""
    decode = {**TIGHT, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
    disagg = {"disaggregation_decode_retraction_backup": backup}
    with disaggregated(checkpoint, decode=decode, disagg=disagg, max_total_tokens=8192, **FLAGS) as pair:
        scheduler = pair.workers[1].parts.scheduler
        draft_from(scheduler, right, "mixed", most=4)
        assert run(pair, ASKED, turns_between=6) == right
        counters = scheduler.counters
        assert counters.retractions > 0 and 0 < counters.accepted_drafts < counters.drafts
        scheduler.check()
        states = scheduler.memory.part(StateSlots)
        assert states is not None and states.allocator.counts()["held"] == 0


def test_a_chat_goes_on_from_what_decode_has_kept(checkpoint: str) -> None:
    """Decode has the answer's KV up to its snapshot, and asks for the rest alone; the state crosses whole."""
    first = prompt_of(200, 30)
    flags = {**FLAGS, "max_total_tokens": 4096}
    with disaggregated(checkpoint, decode={}, disagg={}, **flags) as pair:
        chat = [*first, *run(pair, [("turn", first, 80)], turns_between=1)["turn"], *prompt_of(20, 31)]
        decode = pair.workers[1].parts.scheduler
        states = decode.memory.part(StateSlots)
        assert states is not None and states.num_snapshots == 1
        found = run(pair, [("next", chat, 16)], turns_between=1)
        sent = pair.workers[0].role
        assert sent.counters()["kv_skipped_bytes"] == 256 // 16 * pair.workers[0].parts.pool.page_bytes
    with EngineInProcess(checkpoint, page_size=16, disable_radix_cache=True) as engine:
        engine.add("next", chat, max_new_tokens=16, ignore_eos=True)
        engine.run()
        assert found["next"] == engine.tokens["next"]


@pytest.mark.parametrize("transfer", ["nixl", "mooncake"])
def test_prefill_gets_the_state_of_an_answer_from_decode(transfer: str, checkpoint: str) -> None:
    """The next turn goes on from decode's last snapshot; prefill has an earlier one of its own."""
    disagg = {"prefix_fetch": True, "disaggregation_transfer_backend": transfer, "disaggregation_kv_checksum": True}
    first, flags = prompt_of(200, 30), {**FLAGS, "max_total_tokens": 4096}
    with disaggregated(checkpoint, decode={}, disagg=disagg, **flags) as pair:
        chat = [*first, *run(pair, [("turn", first, 80)], turns_between=1)["turn"], *prompt_of(20, 31)]
        found, prefill = next_turn(pair, chat, known=256), pair.workers[0]
        assert prefill.role.counters()["prefix_fetched_tokens"] == 256 - 192
        assert prefill.parts.scheduler.counters.cached_tokens == 256
        states, cache = prefill.parts.scheduler.memory.part(StateSlots), prefill.parts.scheduler.memory.cache
        assert states is not None
        node = next(iter(states._nodes.values()))
        cache.lock(node)
        assert not states._may_go(node), "a peer reads it"
        cache.unlock(node)
    with EngineInProcess(checkpoint, page_size=16, disable_radix_cache=True) as engine:
        engine.add("next", chat, max_new_tokens=16, ignore_eos=True)
        engine.run()
        assert found == engine.tokens["next"]
