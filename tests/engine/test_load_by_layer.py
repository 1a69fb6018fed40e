"""A prefix comes back from the host layer by layer behind the compute: a layer waits for its own part, and for no more.

Copies run as late as the order allows: what a layer reads without waiting for it is not there, and what is there before the
layer was waited for too early.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.core.mem_cache.host_cache import HostCache
from engine.core.plan import Plan
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.layer_marks import after_arrival
from engine.kernels.tape import Tape
from engine.kv import page_copies
from engine.kv.page_copies import Arrival
from engine.layers.rope import Unturned
from tests.engine.device.late_copies import copy_late
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.three_requests import two_models
from tests.hicache.streams_in_a_test import MarkInATest
from tests.models.tiny_checkpoints import make_tiny_checkpoint

LAYERS = 4
PROMPT = prompt_of(41, seed=1)
TINY = {"page_size": 4, "max_total_tokens": 64, "enable_hierarchical_cache": True, "hicache_ratio": 8.0}
Log = list[tuple[str, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=LAYERS)


@pytest.fixture
def engine(checkpoint: str) -> Iterator[EngineInProcess]:
    with EngineInProcess(checkpoint, **TINY) as engine:  # type: ignore[arg-type]
        yield engine


def forward_pass(engine: EngineInProcess) -> Any:
    return engine.parts.device.executor.runner.forward_pass


def push_out(engine: EngineInProcess) -> None:
    engine.answer("other", prompt_of(60, seed=2), max_new_tokens=1)


@pytest.fixture
def log(engine: EngineInProcess, monkeypatch: pytest.MonkeyPatch) -> Log:
    """What happens from now on: ("copied", first layer of a group), ("attends", layer)."""
    happened: Log = []
    monkeypatch.setattr(page_copies, "MIN_GROUP_BYTES", 1)
    copy_late(engine, on_load=lambda layer: happened.append(("copied", layer)))
    backend = forward_pass(engine).backend
    attend = backend.attend

    def logged(layer: int, new: Unturned) -> Tensor:
        happened.append(("attends", layer))
        return attend(layer, new)

    monkeypatch.setattr(backend, "attend", logged)
    return happened


@pytest.mark.parametrize("watched", [False, True])
def test_each_layer_waits_for_its_own_part_alone(engine: EngineInProcess, log: Log, watched: bool) -> None:
    """`watched`: layers are marked as well, for a transfer."""
    if watched:
        engine.parts.device.layers.watch(range(1, LAYERS + 1), lambda: None)
    engine.answer("first", PROMPT, max_new_tokens=3)
    push_out(engine)
    log.clear()
    engine.add("again", PROMPT, max_new_tokens=3)
    engine.turn()
    by_layer = [("copied", layer) for layer in range(LAYERS)], [("attends", layer) for layer in range(LAYERS)]
    assert log[: 2 * LAYERS] == [event for pair in zip(*by_layer, strict=True) for event in pair]
    engine.run()
    assert engine.tokens["again"] == engine.tokens["first"] and engine.cached["again"] == 40


def test_a_prompt_in_parts_waits_in_its_first_step(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineInProcess(checkpoint, **TINY, chunked_prefill_size=8) as engine:  # type: ignore[arg-type]
        copied = list[int]()
        monkeypatch.setattr(page_copies, "MIN_GROUP_BYTES", 1)
        copy_late(engine, on_load=copied.append)
        engine.answer("first", PROMPT[:20], max_new_tokens=1)
        push_out(engine)
        engine.add("longer", PROMPT, max_new_tokens=3)
        engine.turn()
        assert copied == list(range(LAYERS))
        engine.run()
        assert engine.cached["longer"] == 20 and copied == list(range(LAYERS))
        assert engine.answer("again", PROMPT, max_new_tokens=3) == engine.tokens["longer"]


class MarkOnHold(MarkInATest):
    """Notes when main has to wait for it; it is reached."""

    def __init__(self, log: Log, layer: int) -> None:
        self._log, self._layer, self.reached = log, layer, True

    def hold_main(self) -> None:
        self._log.append(("held", self._layer))


def arrival(log: Log) -> Arrival:
    return Arrival([(layer, [MarkOnHold(log, layer)]) for layer in range(LAYERS)])


def test_a_recorded_step_waits_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape computes all layers in one call."""
    path, _ = two_models(tmp_path, layers=LAYERS, hidden=64, intermediate=96)
    log: Log = []
    play = Tape.play

    def noted(tape: Tape) -> None:
        log.append(("plays", 0))
        play(tape)

    monkeypatch.setattr(Tape, "play", noted)
    with EngineInProcess(path, dtype="bfloat16") as engine:
        run = forward_pass(engine).run
        monkeypatch.setattr(forward_pass(engine), "run", lambda model, plan, _: run(model, plan, (arrival(log),)))
        engine.answer("r", PROMPT, max_new_tokens=4)
        plays = [("plays", 0)] * (engine.recorded(DecodeTapes) is not None)
    assert log[-LAYERS - len(plays) :] == [*(("held", layer) for layer in range(LAYERS)), *plays]


def test_a_layer_waits_for_every_group_up_to_it() -> None:
    log: Log = []
    groups = Arrival([(0, [MarkOnHold(log, 0)]), (2, [MarkOnHold(log, 2)])])
    attend = after_arrival(lambda layer, new: log.append(("attends", layer)), groups)  # type: ignore[arg-type, func-returns-value]
    for layer in range(3):
        attend(layer, None)  # type: ignore[arg-type]
    assert log == [("held", 0), ("attends", 0), ("attends", 1), ("held", 2), ("attends", 2)]


def test_a_step_that_reads_nothing_of_a_load_does_not_wait_for_it(
    engine: EngineInProcess, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step that does waits for all of it first; so does a collect, since the host page is free then."""
    engine.answer("first", PROMPT, max_new_tokens=1)
    push_out(engine)
    from_host = list[Any]()
    begin = engine.parts.device.executor.runner.copies._host_pool.begin  # type: ignore[union-attr]

    def unread(plan: Plan) -> Arrival:
        from_host.extend(plan.from_host)
        items, plan.items = plan.items, []
        early = begin(plan)
        plan.items, plan.from_host = items, []
        assert log == [], "a load that no item reads was waited for"
        assert early.is_held
        begin(plan)
        assert log == [("copied", 0)], "it comes as a whole"
        return early

    log.clear()
    engine.add("again", PROMPT, max_new_tokens=1)
    monkeypatch.setattr(engine.parts.device.executor.runner.copies._host_pool, "begin", unread)
    engine.run()
    assert from_host and engine.tokens["again"] == engine.tokens["first"]


@pytest.mark.parametrize("stream", ["inline", "threaded", "late copies"])
def test_a_prefix_that_was_loaded_ahead_gives_the_same_tokens(checkpoint: str, stream: str) -> None:
    """Three requests to each of four prefixes, two at a time; the device holds two of them."""
    prompts = [[*prompt_of(40, seed=seed), 20 + i] for i in range(3) for seed in range(4)]
    flags = {**TINY, "max_total_tokens": 160, "max_running_requests": 2}
    found = list[list[list[int]]]()
    for cached in (False, True):
        asked = flags if cached else {"page_size": 4, "disable_radix_cache": True}
        with EngineInProcess(checkpoint, **asked, stream="threaded" if stream == "threaded" else "inline") as engine:  # type: ignore[arg-type]
            if cached:
                host_of(engine).ahead_pages = 100
            if cached and stream == "late copies":
                copy_late(engine)
            for i, prompt in enumerate(prompts):
                engine.add(str(i), prompt, max_new_tokens=3 + i % 2)
            engine.run()
            found.append([engine.tokens[str(i)] for i in range(len(prompts))])
            if cached:
                assert host_of(engine).counted["hicache_loaded_ahead_pages"] >= 40
    assert found[0] == found[1]


def host_of(engine: EngineInProcess) -> HostCache:
    host = engine.parts.scheduler.memory.part(HostCache)
    assert host is not None
    return host
