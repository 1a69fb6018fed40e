"""Control with the production scheduler and the hash model: pauses, weights, profiles, and which requests may enter meanwhile."""

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import (
    ContinueGeneration,
    ControlReply,
    JoinTrainer,
    LeaveTrainer,
    NameWeights,
    NewTensors,
    PauseGeneration,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from service.flags import ConfigError
from tests.core.hash_model import expected_tokens
from tests.loop.loop_in_a_test import LoopInATest

DEADLINE_S = 20.0
PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [9, 8, 7]}


def test_bad_and_crossing_pauses_are_refused() -> None:
    rig = LoopInATest(2, max_running=8)
    rig.tell(PauseGeneration("bad", "nap"))
    assert rig.replies["bad"].status == 400 and "mode" in rig.replies["bad"].message and not rig.control.paused
    rig.ask("a", PROMPTS["a"], 9)
    rig.turns(2)
    rig.tell(PauseGeneration("one", "retract"), PauseGeneration("two", "retract"))
    assert rig.replies["two"].status == 409
    rig.tell(ContinueGeneration("go"))
    assert rig.replies["one"].ok and rig.replies["go"].ok
    rig.settle()
    assert rig.engine.tokens["a"] == expected_tokens(PROMPTS["a"], 9)


def test_a_pause_tells_how_many_requests_it_retracted() -> None:
    rig = LoopInATest(2, max_running=8)
    for rid, prompt in PROMPTS.items():
        rig.ask(rid, prompt, 9)
    rig.turns(4)
    for mode, retracted in (("in_place", 0), ("retract", len(PROMPTS)), ("retract", 0)):
        rig.tell(PauseGeneration("pause", mode))
        rig.settle()
        assert rig.replies.pop("pause").values == {"retracted": retracted, "paused": mode}
    rig.tell(ContinueGeneration("go"))
    rig.settle()
    assert rig.replies["go"].values == {"paused": ""}
    assert rig.engine.tokens == {rid: expected_tokens(prompt, 9) for rid, prompt in PROMPTS.items()}


def test_new_weights_wait_for_running_requests_and_hold_new_ones() -> None:
    rig = LoopInATest(2, max_running=8)
    rig.ask("old", PROMPTS["a"], 10)
    rig.turns(2)
    rig.tell(UpdateWeights("u", "new", weight_version="v2"))
    rig.turns(2)
    rig.ask("during", PROMPTS["b"], 2)  # the checkpoint is still being read: nobody waits
    assert "during" not in rig.engine.finish and rig.control.num_held == 0
    rig.weights.future.set_result("model")
    rig.turns(1)
    rig.ask("after", PROMPTS["a"], 2)
    assert rig.control.num_held == 1 and not rig.weights.taken
    rig.settle()
    assert rig.weights.taken == ["model"] and (rig.weights.model_path, rig.weights.version) == ("new", "v2")
    assert rig.replies["u"].values == {"model_path": "new", "weight_version": "v2"}
    assert rig.engine.tokens["old"] == expected_tokens(PROMPTS["a"], 10)
    assert rig.engine.outputs["after"][0].cached_tokens == 0  # the cache was flushed
    assert list(rig.engine.finish) == ["during", "old", "after"]


def test_new_weights_may_abort_running_requests_but_not_for_a_bad_checkpoint() -> None:
    rig = LoopInATest(2, max_running=8)
    rig.ask("a", PROMPTS["a"], 30)
    rig.turns(2)
    rig.tell(UpdateWeights("bad", "nope", abort_all=True))
    rig.weights.future.set_exception(ConfigError("config.json: num_layers is 3"))
    rig.turns(2)
    assert rig.replies["bad"].status == 400 and rig.replies["bad"].message.startswith("model_path: config.json")
    assert not rig.engine.finish and rig.weights.version == "v1"
    rig.tell(UpdateWeights("good", "new", abort_all=True))
    rig.tell(UpdateWeights("third", "new"))
    assert rig.replies["third"].status == 409
    rig.weights.future.set_result("model")
    rig.settle()
    assert rig.engine.finish["a"].kind == "abort" and rig.replies["good"].ok and rig.weights.version == "v1"


def test_weights_get_another_name_while_requests_run_or_end() -> None:
    rig = LoopInATest(2, max_running=8)
    rig.ask("a", PROMPTS["a"], 9)
    rig.turns(2)
    rig.tell(NameWeights("n", "v7"))
    assert rig.replies["n"].values == {"model_path": "old", "weight_version": "v7"} and "a" not in rig.engine.finish
    rig.weights.source = "tensors"
    rig.tell(NameWeights("n", "v8", abort_all=True))
    wanted = {"model_path": "old", "weight_version": "v8", "weight_source": "tensors"}
    assert rig.replies["n"].values == wanted and rig.engine.finish["a"].kind == "abort"
    assert not rig.weights.asked and rig.weights.version == "v8"


def test_tensors_keep_the_path_and_their_errors_name_the_body_s_field() -> None:
    rig = LoopInATest(2, max_running=8)
    for tensors, error, text in (
        (NewTensors(data=b"x"), ConfigError("tensor a is not part of the model"), "serialized_named_tensors: tensor a"),
        (NewTensors(group="g"), ConfigError("tensor a is not part of the model"), "names: tensor a"),
        (NewTensors(group="g"), ConfigError("group_name: 'g' broke"), "group_name: 'g' broke"),
        (NewTensors(group="g"), KeyError("bug"), "names: they cannot be read"),
    ):
        rig.tell(UpdateWeights("u", tensors=tensors))
        rig.weights.future.set_exception(error)
        rig.settle()
        assert rig.replies["u"].status == 400 and rig.replies["u"].message.startswith(text), rig.replies["u"]
    rig.weights.source = "tensors"
    rig.tell(UpdateWeights("u", weight_version="v2", tensors=NewTensors(data=b"x")))
    rig.weights.future.set_result("model")
    rig.settle()
    assert rig.weights.asked[-1] == ("old", NewTensors(data=b"x"))
    wanted = {"model_path": "old", "weight_version": "v2", "weight_source": "tensors"}
    assert rig.replies["u"].values == wanted


class HeldTrainers:
    """Calls wait until the test lets them end."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.go = threading.Event()
        self.error: Exception | None = None

    def join(self, asked: JoinTrainer) -> None:
        self.asked.append(asked)
        assert self.go.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def leave(self, name: str) -> None:
        self.asked.append(name)


def test_a_join_waits_for_the_trainer_while_tokens_come() -> None:
    trainers = HeldTrainers()
    rig = LoopInATest(2, trainers=trainers)
    join = JoinTrainer("j", "g", "h", 1, rank_offset=1, world_size=2, backend="gloo")
    rig.tell(join)
    rig.ask("a", PROMPTS["a"], 9)
    rig.settle()
    assert rig.engine.tokens["a"] == expected_tokens(PROMPTS["a"], 9) and "j" not in rig.replies
    trainers.go.set()
    assert reply_of(rig, "j").ok and trainers.asked == [join]
    trainers.error = ConfigError("master_address: nothing is there")
    rig.tell(join)
    assert reply_of(rig, "j").message == "master_address: nothing is there"
    trainers.error = KeyError("bug")
    rig.tell(join)
    assert reply_of(rig, "j").message.startswith("group_name: 'g' failed")
    rig.tell(LeaveTrainer("l", "g"))
    assert reply_of(rig, "l").ok and trainers.asked[-1] == "g"
    rig.tell(join, LeaveTrainer("l", "g"))
    assert not reply_of(rig, "j").ok and reply_of(rig, "l").ok


def test_an_engine_without_trainers_refuses_them() -> None:
    rig = LoopInATest(1)
    rig.tell(LeaveTrainer("l", "g"))
    assert reply_of(rig, "l").message == "this worker joins no groups of trainers"


def reply_of(rig: LoopInATest, call_id: str) -> ControlReply:
    """Turns the loop until the call is answered."""
    until_s = time.monotonic() + DEADLINE_S
    while call_id not in rig.replies:
        assert time.monotonic() < until_s
        rig.turns(1)
    return rig.replies.pop(call_id)


def test_kv_on_its_way_to_a_peer_is_no_ground_for_new_weights() -> None:
    rig = LoopInATest(2, max_running=8)
    request = rig.engine.add("a", PROMPTS["a"])
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
    rig = LoopInATest(1)
    rig.tell(StopProfile("none"))
    assert rig.replies["none"].status == 400
    rig.tell(StartProfile("zero", num_steps=0))
    assert "num_steps" in rig.replies["zero"].message and not rig.profiler.running
    rig.tell(StartProfile("s", num_steps=2))
    rig.tell(StartProfile("again"))
    assert rig.replies["s"].values == {"file": "/trace"} and rig.replies["again"].status == 400
    rig.ask("r", PROMPTS["b"], 9)
    assert rig.profiler.running, "one step has been collected"
    rig.turns(1)
    assert not rig.profiler.running
    rig.tell(StartProfile("s2", num_steps=3))
    rig.turns(1)
    assert rig.profiler.running, "each step counts once"
    rig.tell(StopProfile("e2"))
    assert rig.replies["e2"].ok and not rig.profiler.running


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
    rig = LoopInATest(depth, chunk=chunk, mixed_chunk=mixed, num_pages=num_pages, max_running=3)
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
    assert rig.engine.tokens == {rid: expected_tokens(prompt, new) for rid, (prompt, new) in asked.items()}
    assert rig.scheduler.holds_no_kv and rig.scheduler.idle and rig.control.num_held == 0
