"""The MTP layer of a model with recurrent states: answers are those of plain decoding, and a layer that is right is always accepted.

Its first draft needs the model's hidden state before the last known token, which lies in the tail of its page; the answer needs the state
behind the last token that counts.
"""

import random
from typing import Any

import pytest

from engine.device.step_memory import EngineUse
from tests.e2e.workload import recall_prompt
from tests.engine.drafts.drafters import always, answers_to, engine_of, fared, spoil_all_but_the_first
from tests.engine.engine_in_process import EngineInProcess
from tools.recall.build import build
from tools.recall.oracle import continuation

NEXTN: dict[str, Any] = {"speculative_algorithm": "NEXTN"}
NEW = 41
RNG = random.Random(5)
PROMPTS = [recall_prompt(RNG, 40 + i) for i in range(4)]  # longer than a chunk of 64
RIGHT = [continuation(prompt, NEW, ignore_eos=True) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    build("recall-hybrid", folder)
    return str(folder)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunked": {"chunked_prefill_size": 64, "page_size": 4},
    "mixed": {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {"test_retract": 4, "use": EngineUse(retracted_kv="host")},
    "recomputed": {"test_retract": 4},
    "without tapes": {"disable_cuda_graph": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_is_right_gives_all_that_a_step_can_hold(path: str, way: str) -> None:
    """40 tokens behind the first: eight steps of four drafts."""
    with EngineInProcess(path, **NEXTN, **WAYS[way]) as engine:
        always(engine.parts.scheduler)
        assert answers_to(engine, PROMPTS, new=NEW) == RIGHT
        how = fared(engine)
    assert how.accepted == how.drafts
    assert how.drafts == 4 * 32 or (way in ("retracted", "recomputed", "mixed", "overlapped") and how.drafts > 90)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_behind_rejected_drafts_the_next_ones_are_right(path: str, tp_size: int) -> None:
    """Each second draft is made wrong on its way to the core, so a step accepts one, and the next begins behind rejected rows."""
    flags = {"tp_size": tp_size, "num_threads": 1, "kv_units": 2, **NEXTN}
    with engine_of(path, **flags) as engine:
        always(engine.parts.scheduler)
        spoil_all_but_the_first(engine)
        assert answers_to(engine, PROMPTS, new=NEW) == RIGHT
        counters = engine.parts.scheduler.counters
    assert counters.accepted_drafts == 4 * 20  # 40 tokens behind the first, two a step at most


def test_prefixes_bring_their_tails(path: str) -> None:
    """Answers pass the end of the prefix, whose next token's entry needs the tail."""
    new = 80
    with EngineInProcess(path, page_size=4, **NEXTN) as engine:
        always(engine.parts.scheduler)
        for turn in range(2):
            for i, prompt in enumerate(PROMPTS):
                engine.add(f"{turn}-{i}", prompt, max_new_tokens=new)
                engine.run()
                assert engine.tokens[f"{turn}-{i}"] == continuation(prompt, new, ignore_eos=True)
        assert [engine.cached[f"1-{i}"] for i in range(4)] == [64] * 4
        how = fared(engine)
    assert how.accepted == how.drafts > 8 * 60
