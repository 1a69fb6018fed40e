"""Control with the production scheduler and the hash model: pauses, weights, profiles, and which requests may enter meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.outputs import StepEffects
from engine.loop.control import EngineControl, ProfileControl
from engine.loop.listeners import OnStep
from engine.messages import (
    ContinueGeneration,
    ControlReply,
    GenerateRequest,
    PauseGeneration,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


class FakeWeights:
    model_path, version, released = "old", "v1", False

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.taken: list[object] = []
        self.discarded: list[object] = []

    def read(self, model_path: str, *, when_done: Callable[[], None]) -> "Future[Any]":
        self.future = Future()
        return self.future

    def take(self, model: object, *, model_path: str, version: str | None) -> None:
        self.taken.append(model)
        self.released = False
        self.model_path, self.version = model_path, version or self.version

    def discard(self, model: object) -> None:
        self.discarded.append(model)

    def release(self) -> None:
        self.released = True


class FakeProfiler:
    running = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, asked: object) -> str:
        self.calls.append("start")
        if self.running:
            raise ConfigError("a profile is running")
        self.running = True
        return "/trace"

    def stop(self) -> str:
        self.calls.append("stop")
        if not self.running:
            raise ConfigError("no profile is running")
        self.running = False
        return "/trace"


class Rig(EngineInATest):
    """The loop's part in it: hold or add, control's turn, no plan while paused."""

    def __init__(self, **limits: object) -> None:
        super().__init__(**{"depth": 2, **limits})  # type: ignore[arg-type]
        self.weights, self.profiler = FakeWeights(), FakeProfiler()
        self.replies: dict[str, ControlReply] = {}
        self.control = EngineControl(
            scheduler=self.scheduler,
            weights=self.weights,
            abort_all=lambda: [o for rid in list(self.scheduler.stages.live) for o in self.scheduler.abort(rid)],
            reply=self._keep,
            wakeup=lambda: None,
        )
        self.watching: list[OnStep] = []
        self.profiles = ProfileControl(self.profiler, reply=self._keep, on_step=self.watching)

    def _keep(self, reply: ControlReply) -> None:
        self.replies[reply.call_id] = reply

    def ask(self, rid: str, prompt: list[int], new: int = 8) -> None:
        request = GenerateRequest(rid, prompt, SamplingParams(max_new_tokens=new))
        if self.control.blocks_input:
            self.control.hold(request)
        else:
            self.enter(request)

    def enter(self, request: GenerateRequest) -> None:
        self.add(request.rid, request.input_ids, max_new_tokens=request.sampling.max_new_tokens)

    def tell(self, message: Any) -> None:
        if isinstance(message, StartProfile | StopProfile):
            self.profiles.on_message(message)
        else:
            self.say(self.control.on_message(message))

    def turn(self) -> bool:
        self.say(self.control.on_turn(num_launched=len(self.launched)))
        for request in self.control.release():
            self.enter(request)
        if not self.control.paused:
            return super().turn()
        if self.launched:
            self.collect()
            return True
        self.scheduler.check()
        return False

    def settle(self) -> None:
        while self.turn():
            pass
        self.turn()


PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [9, 8, 7]}


def test_bad_and_crossing_pauses_are_refused() -> None:
    rig = Rig()
    rig.tell(PauseGeneration("bad", "nap"))
    assert rig.replies["bad"].status == 400 and "mode" in rig.replies["bad"].message and not rig.control.paused
    rig.ask("a", PROMPTS["a"], 9)
    rig.turns(2)
    rig.tell(PauseGeneration("one", "retract"))
    rig.tell(PauseGeneration("two", "retract"))
    assert rig.replies["two"].status == 409
    rig.tell(ContinueGeneration("go"))
    assert rig.replies["one"].ok and rig.replies["go"].ok
    rig.settle()
    assert rig.tokens["a"] == expected_tokens(PROMPTS["a"], 9)


def test_a_pause_tells_how_many_requests_it_retracted() -> None:
    rig = Rig()
    for rid, prompt in PROMPTS.items():
        rig.ask(rid, prompt, 9)
    rig.turns(4)
    for mode, retracted in (("in_place", 0), ("retract", len(PROMPTS)), ("retract", 0)):
        rig.tell(PauseGeneration("pause", mode))
        rig.settle()
        assert rig.replies.pop("pause").values == {"retracted": retracted}
    rig.tell(ContinueGeneration("go"))
    rig.settle()
    assert rig.tokens == {rid: expected_tokens(prompt, 9) for rid, prompt in PROMPTS.items()}


def test_new_weights_wait_for_running_requests_and_hold_new_ones() -> None:
    rig = Rig()
    rig.ask("old", PROMPTS["a"], 10)
    rig.turns(2)
    rig.tell(UpdateWeights("u", "new", weight_version="v2"))
    rig.turns(2)
    rig.ask("during", PROMPTS["b"], 2)  # the checkpoint is still being read: nobody waits
    assert "during" not in rig.finish and rig.control.num_held == 0
    rig.weights.future.set_result("model")
    rig.turn()
    rig.ask("after", PROMPTS["a"], 2)
    assert rig.control.num_held == 1 and not rig.weights.taken
    rig.settle()
    assert rig.weights.taken == ["model"] and (rig.weights.model_path, rig.weights.version) == ("new", "v2")
    assert rig.replies["u"].values == {"model_path": "new", "weight_version": "v2"}
    assert rig.tokens["old"] == expected_tokens(PROMPTS["a"], 10)
    assert rig.outputs["after"][0].cached_tokens == 0  # the cache was flushed
    assert list(rig.finish) == ["during", "old", "after"]


def test_new_weights_may_abort_running_requests_but_not_for_a_bad_checkpoint() -> None:
    rig = Rig()
    rig.ask("a", PROMPTS["a"], 30)
    rig.turns(2)
    rig.tell(UpdateWeights("bad", "nope", abort_all=True))
    rig.weights.future.set_exception(ConfigError("config.json: num_layers is 3"))
    rig.turns(2)
    assert rig.replies["bad"].status == 400 and rig.replies["bad"].message.startswith("model_path: config.json")
    assert not rig.finish and rig.weights.version == "v1"
    rig.tell(UpdateWeights("good", "new", abort_all=True))
    rig.tell(UpdateWeights("third", "new"))
    assert rig.replies["third"].status == 409
    rig.weights.future.set_result("model")
    rig.settle()
    assert rig.finish["a"].kind == "abort" and rig.replies["good"].ok and rig.weights.version == "v1"


def test_kv_on_its_way_to_a_peer_is_no_ground_for_new_weights() -> None:
    rig = Rig()
    request = rig.add("a", PROMPTS["a"])
    request.prefill_only = True
    rig.turns(2)
    rig.tell(PauseGeneration("p", "retract"))
    rig.tell(UpdateWeights("u", "new"))
    rig.weights.future.set_result("model")
    rig.turns(4)
    assert rig.replies["u"].status == 409 and not rig.weights.taken and len(rig.weights.discarded) == 1
    rig.tell(ContinueGeneration("go"))
    assert not rig.control.blocks_input


def test_a_profile_ends_on_request_or_after_its_steps() -> None:
    rig = Rig()
    rig.tell(StopProfile("none"))
    assert rig.replies["none"].status == 400
    rig.tell(StartProfile("zero", num_steps=0))
    assert "num_steps" in rig.replies["zero"].message and not rig.profiler.running
    rig.tell(StartProfile("s", num_steps=2))
    rig.tell(StartProfile("again"))
    assert rig.replies["s"].values == {"file": "/trace"} and rig.replies["again"].status == 400
    (count_step,) = rig.watching
    count_step(StepEffects(), 0.0)
    assert rig.profiler.running
    count_step(StepEffects(), 0.0)
    assert not rig.profiler.running
    rig.tell(StartProfile("s2"))
    rig.tell(StopProfile("e2"))
    assert rig.replies["e2"].ok and not rig.profiler.running and len(rig.watching) == 1


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # turns before it
        st.sampled_from(["ask", "ask", "ask", "retract", "in_place", "continue", "update"]),
        st.integers(1, 14),  # prompt length
        st.integers(1, 12),  # new tokens
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=120, deadline=None)
@given(
    events=EVENTS,
    depth=st.integers(1, 3),
    chunk=st.sampled_from([None, 4, 8]),
    mixed=st.booleans(),
    num_pages=st.integers(14, 40),
)
def test_pauses_and_updates_change_no_token(
    events: list[tuple[int, str, int, int]], depth: int, chunk: int | None, mixed: bool, num_pages: int
) -> None:
    """The "new" weights are the same here: what is retracted, flushed and computed again must give the same tokens."""
    rig = Rig(depth=depth, chunk=chunk, mixed_chunk=mixed, num_pages=num_pages, max_running=3)
    asked: dict[str, tuple[list[int], int]] = {}
    calls: list[str] = []
    for i, (turns, event, length, new) in enumerate(events):
        rig.turns(turns)
        rid = f"{event}-{i}"
        if event == "ask":
            asked[rid] = ([(i * 5 + k) % 40 for k in range(length)], new)
            rig.ask(rid, *asked[rid])
            continue
        calls.append(rid)
        if event == "continue":
            rig.tell(ContinueGeneration(rid))
        elif event == "update":
            rig.tell(UpdateWeights(rid, "new"))
            if not rig.weights.future.done():
                rig.weights.future.set_result("model")
        else:
            rig.tell(PauseGeneration(rid, event))
    rig.settle()
    rig.tell(ContinueGeneration("end"))
    rig.settle()
    rig.settle()  # an update that waited for the last request lets the held ones in
    assert rig.replies.keys() == {*calls, "end"}  # every call is answered
    assert rig.tokens == {rid: expected_tokens(prompt, new) for rid, (prompt, new) in asked.items()}
    assert rig.scheduler.holds_no_kv and rig.scheduler.idle and rig.control.num_held == 0
