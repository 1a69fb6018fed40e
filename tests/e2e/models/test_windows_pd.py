"""A model with windows served by two workers whose window layers have pools of their own: the tokens of one engine that keeps all KV."""

from typing import Any

import pytest

from engine.core.mem_cache.window_pages import WindowPages
from tests.e2e.models.group_models import ALL_WINDOWS, SOME_WINDOWS, Made
from tests.e2e.two_engines import disaggregated, next_turn, run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

SYSTEM = prompt_of(80, 9)
PROMPTS = [
    *(SYSTEM + prompt_of(20 + 7 * i, i) for i in range(4)),
    prompt_of(16, 20),
    prompt_of(3, 21),
    prompt_of(150, 22),
]
ASKED = [(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
FLAGS: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 32, "stream": "threaded", "stream_delay_s": 0.0003}
TIGHT = {"max_total_tokens": 400, "schedule_conservativeness": 0.0}
MOONCAKE = {"disaggregation_transfer_backend": "mooncake"}
IN_TURN = ("gpt_oss", {"sliding_window": 22})  # the first layer has a window, the second one none
WAYS: dict[str, tuple[Made, dict[str, Any], dict[str, Any]]] = {  # model, flags of transfer, of decode
    "nixl": (SOME_WINDOWS, {}, {}),
    "all layers": (ALL_WINDOWS, {}, {}),
    "by layers": (IN_TURN, {"disaggregation_layerwise_transfer": "on"}, {}),
    "recompute": (SOME_WINDOWS, {}, TIGHT),
    "host": (SOME_WINDOWS, {"disaggregation_decode_retraction_backup": "host", **MOONCAKE}, TIGHT),
    "prefill": (SOME_WINDOWS, {"disaggregation_decode_retraction_backup": "prefill"}, TIGHT),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_give_the_tokens_of_one(way: str, tmp_path: Any) -> None:
    (family, overrides), transfer, decode = WAYS[way]
    checkpoint = make_tiny_checkpoint(tmp_path / family, family, **overrides)
    with EngineInProcess(checkpoint, page_size=4, disable_radix_cache=True, disable_hybrid_swa_memory=True) as engine:
        for rid, prompt, new in ASKED:
            engine.add(rid, prompt, max_new_tokens=new)
        engine.run()
        assert engine.parts.scheduler.memory.part(WindowPages) is None
        right = engine.tokens
    with disaggregated(checkpoint, decode=decode, disagg=transfer, max_total_tokens=4096, **FLAGS) as pair:
        assert run(pair, ASKED, turns_between=6) == right
        again = [(f"again {rid}", prompt, new) for rid, prompt, new in ASKED]
        answers = run(pair, again, turns_between=6)
        assert [answers[rid] for rid, _, _ in again] == [right[rid] for rid, _, _ in ASKED]
        assert pair.workers[0].parts.device.layers.watched == (way == "by layers")
        prefill, last = (worker.parts.scheduler for worker in pair.workers)
        assert prefill.counters.cached_tokens >= 80 * 4 and (last.counters.retractions > 0) == bool(decode)
        for scheduler in (prefill, last):
            scheduler.check()
            windows = scheduler.memory.part(WindowPages)
            assert windows is not None and windows.num_retired > 0
            assert windows.num_available == windows.allocator.num_pages


@pytest.mark.parametrize(("size", "new"), [(100, 41), (8, 13)])
def test_prefill_gets_the_last_window_of_an_answer_from_decode(size: int, new: int, tmp_path: Any) -> None:
    """The second one is shorter than a window: fewer pages come than prefill has given."""
    family, overrides = SOME_WINDOWS
    checkpoint = make_tiny_checkpoint(tmp_path / family, family, **overrides)
    disagg = {"prefix_fetch": True, "disaggregation_kv_checksum": True}
    first, flags = prompt_of(size, 30), {**FLAGS, "max_total_tokens": 4096}
    with disaggregated(checkpoint, decode={}, disagg=disagg, **flags) as pair:
        history = [*first, *run(pair, [("turn", first, new)], turns_between=1)["turn"]]
        chat = [*history, *prompt_of(20, 31)]
        found = next_turn(pair, chat, known=len(history) - 1)
        prefill = pair.workers[0]
        assert prefill.role.counters()["prefix_fetched_tokens"] == new - 1, "whole pages"
        for worker in pair.workers:
            windows = worker.parts.scheduler.memory.part(WindowPages)
            assert windows is not None and windows.num_available == windows.allocator.num_pages
    with EngineInProcess(checkpoint, page_size=4, disable_radix_cache=True) as engine:
        engine.add("next", chat, max_new_tokens=16, ignore_eos=True)
        engine.run()
        assert found == engine.tokens["next"]
