"""Released memory, with the production scheduler: what keeps it, what happens to requests meanwhile, and how it comes again."""

import pytest

from engine.loop.control import TAGS, FixedKV, KVMemory, OccupationControl
from engine.messages import ControlReply, NewTensors, ReleaseMemory, ResumeMemory, UpdateWeights
from tests.loop.loop_in_a_test import LoopInATest
from tests.loop.test_control import PROMPTS


class KeptKV:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def release(self) -> None:
        self.asked.append("release")

    def resume(self) -> None:
        self.asked.append("resume")


def worker(kv: KVMemory | None = None) -> tuple[LoopInATest, KeptKV]:
    kept = KeptKV()
    return LoopInATest(2, kv=kv or kept), kept


def occupation_of(rig: LoopInATest) -> OccupationControl:
    return rig.loop._controls.occupation


def release(rig: LoopInATest, *tags: str) -> ControlReply:
    rig.tell(ReleaseMemory("r", tags))
    return rig.replies.pop("r")


def resume(rig: LoopInATest, *tags: str) -> ControlReply | None:
    rig.tell(ResumeMemory("r", tags))
    return rig.replies.pop("r", None)


def test_memory_goes_only_when_no_request_lives_and_prefixes_go_with_it() -> None:
    rig, kv = worker()
    rig.ask("a", PROMPTS["a"])
    rig.turns(1)
    refused = release(rig)
    assert (refused.ok, refused.status, refused.message) == (
        False,
        409,
        "1 requests live (POST /abort_request ends them); nothing was released",
    )
    assert kv.asked == [] and not rig.weights.released and occupation_of(rig).refusal is None
    rig.settle()
    assert rig.scheduler.memory.cache.num_pages > 0
    released = release(rig)
    assert released.ok and released.values == {"released": "kv_cache,weights"}
    assert kv.asked == ["release"] and rig.weights.released and rig.scheduler.memory.cache.num_pages == 0
    refusal = occupation_of(rig).refusal
    assert refusal is not None and refusal.status == 503 and "/resume_memory_occupation" in refusal.message
    assert release(rig).ok and kv.asked == ["release"], "released twice"


def test_weights_come_again_from_their_checkpoint() -> None:
    rig, kv = worker()
    release(rig)
    assert resume(rig, "kv_cache") is not None and occupation_of(rig).released == ["weights"]
    assert resume(rig) is None, "weights are still being read"
    rig.weights.future.set_result("the same")
    rig.settle()
    assert rig.replies.pop("r").ok and rig.weights.taken == ["the same"]
    assert rig.weights.asked == [("old", NewTensors())], "with the tensors that trainers sent"
    assert kv.asked == ["release", "resume"] and occupation_of(rig).released == []
    assert resume(rig) is not None, "nothing is released"


def test_other_weights_may_come_in_their_place() -> None:
    rig, _ = worker()
    release(rig, "weights")
    rig.tell(UpdateWeights("u", "new"))
    rig.weights.future.set_result("others")
    rig.settle()
    assert rig.weights.model_path == "new" and occupation_of(rig).refusal is None


def test_a_checkpoint_that_is_gone_leaves_the_weights_released() -> None:
    rig, _ = worker()
    release(rig, "weights")
    resume(rig, "weights")
    rig.weights.future.set_exception(OSError("no such file"))
    rig.settle()
    reply = rig.replies.pop("r")
    assert not reply.ok and "no such file" in reply.message and occupation_of(rig).released == ["weights"]


@pytest.mark.parametrize("call", ["release", "resume"])
def test_unknown_tags_are_refused(call: str) -> None:
    rig, kv = worker()
    reply = {"release": release, "resume": resume}[call](rig, "kv_cache", "kv")
    assert (reply.status, reply.message) == (400, f"tags: must be of {', '.join(TAGS)}, got 'kv'")
    assert occupation_of(rig).released == [] and kv.asked == []


def test_kv_that_cannot_be_released_keeps_the_weights_too() -> None:
    rig, _ = worker(FixedKV("it is registered"))
    reply = release(rig)
    assert (reply.status, reply.message) == (400, "it is registered") and occupation_of(rig).released == []
    assert release(rig, "weights", "cuda_graph").ok and occupation_of(rig).released == ["weights"]
