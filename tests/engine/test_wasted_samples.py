"""A draw after the end, on the device: the slot's next owner has nothing of it, penalties and futures included."""

import pytest

from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import EOS, make_tiny_checkpoint

SAMPLING = {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.4, "max_new_tokens": 12}


def answers(path: str, **flags: object) -> tuple[EngineInProcess, dict[str, object]]:
    """Five requests, one after the other in the only slot; the odd ones are sure to end by EOS before their length."""
    with EngineInProcess(path, max_running_requests=1, **flags) as engine:
        for i in range(5):
            ends = {"ignore_eos": False, "min_new_tokens": 3, "logit_bias": {EOS: 100.0}} if i % 2 else {}
            options = LogprobOptions(-1, 2)
            engine.add(f"r{i}", list(range(20, 26 + i)), logprobs=options, seed=i, **{**SAMPLING, **ends})
        engine.run()
    return engine, {"tokens": engine.tokens, "finish": engine.finish, "logprobs": engine.logprobs}


def test_the_next_owner_of_a_slot_has_nothing_of_a_wasted_draw(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    plain, expected = answers(path, depth=1)
    overlapped, got = answers(path, depth=2, stream="threaded", stream_delay_s=0.0005)
    assert got == expected
    assert plain.parts.scheduler.counters.wasted_samples == 0
    assert overlapped.parts.scheduler.counters.wasted_samples == 2
    assert [len(overlapped.tokens[f"r{i}"]) for i in range(5)] == [12, 4, 12, 4, 12]
