"""A step for which the device has no memory, in a whole engine: it ends its own requests, and the worker goes on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.device.step_memory import LocalMachine
from engine.models.load import load_model
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS = {"chunked_prefill_size": 64, "enable_mixed_chunk": False, "dtype": "float32"}
WAYS = {"depth-1": {}, "depth-2": {"stream": "threaded", "stream_delay_s": 0.0005}}
PROMPT = list(range(30, 230))  # four chunks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


class OneFailure:
    """Wraps a model's `forward` or `logits`: the first call with more than `above` rows finds no memory."""

    def __init__(self, what: str, *, above: int) -> None:
        self.what, self.above = what, above
        self.done = True

    def load(self, *args: object, **kwargs: object) -> object:
        model = load_model(*args, **kwargs)  # type: ignore[arg-type]
        setattr(model, self.what, self._failing(getattr(model, self.what)))
        return model

    def _failing(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(rows: Tensor, *rest: object) -> Tensor:
            if not self.done and len(rows) > self.above:
                self.done = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. If reserved but unused")
            return compute(rows, *rest)

        return computed


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    return WAYS[request.param]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[str, list[int]]:
    with EngineInProcess(checkpoint, **FLAGS) as engine:  # type: ignore[arg-type]
        engine.add("decodes", [20, 30, 40], max_new_tokens=20)
        engine.answer("again", PROMPT, max_new_tokens=5)
    return engine.tokens


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_prefill_step_ends_its_prompt_alone(
    checkpoint: str, expected: dict[str, list[int]], way: dict[str, object], chunk: int
) -> None:
    failure = OneFailure("forward", above=10)
    with EngineInProcess(checkpoint, machine=LocalMachine(load=failure.load), **FLAGS, **way) as engine:  # type: ignore[arg-type]
        engine.add("decodes", [20, 30, 40], max_new_tokens=20)
        engine.turn()
        engine.add("fails", PROMPT, max_new_tokens=5)
        for _ in range(chunk):
            engine.turn()
        failure.done = False
        engine.run()
        engine.answer("again", PROMPT, max_new_tokens=5)
    assert_failed_alone(engine, "fails")
    assert engine.tokens["fails"] == [] and engine.tokens["decodes"] == expected["decodes"]
    assert engine.tokens["again"] == expected["again"], "KV that was never written was found"


def test_a_decode_step_ends_what_it_holds(
    checkpoint: str, expected: dict[str, list[int]], way: dict[str, object]
) -> None:
    """In its sampling, too, and with a mask or a step in flight behind it."""
    failure = OneFailure("logits", above=1)
    with EngineInProcess(checkpoint, machine=LocalMachine(load=failure.load), **FLAGS, **way) as engine:  # type: ignore[arg-type]
        for i in range(3):
            engine.add(f"r{i}", [20 + i, 30, 40], max_new_tokens=20, temperature=1.0, seed=i)
        for _ in range(5):
            engine.turn()
        failure.done = False
        engine.run()
        engine.answer("again", PROMPT, max_new_tokens=5)
    assert_failed_alone(engine, "r0", "r1", "r2")
    assert engine.tokens["again"] == expected["again"]


def assert_failed_alone(engine: EngineInProcess, *rids: str) -> None:
    scheduler = engine.parts.scheduler
    failed = {rid for rid, finish in engine.finish.items() if finish.kind == "abort"}
    assert failed == set(rids) and scheduler.counters.failed_steps == 1
    assert all(engine.finish[rid].status == 503 and "1.00 GiB" in engine.finish[rid].message for rid in rids)
    assert scheduler.memory.allocator.counts()["held"] == 0 and scheduler.idle
    scheduler.check()
