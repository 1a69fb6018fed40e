"""Released memory, with the production scheduler: what keeps it, what happens to requests meanwhile, and how it comes again."""

import pytest

from engine.loop.control import TAGS, FixedKV, OccupationControl
from engine.messages import ControlReply, ReleaseMemory, ResumeMemory, UpdateWeights
from tests.loop.test_control import PROMPTS, Rig


class KeptKV:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def release(self) -> None:
        self.asked.append("release")

    def resume(self) -> None:
        self.asked.append("resume")


class Released(Rig):
    def __init__(self, kv: FixedKV | None = None) -> None:
        super().__init__()
        self.kv = KeptKV()
        self.occupation = OccupationControl(
            kv=kv or self.kv,
            weights=self.weights,
            why_busy=lambda: "" if self.scheduler.idle else "a request lives",
            flush=self.scheduler.flush_cache,
            update=self.control.on_message,
            reply=self._keep,
            refusals=[],
        )

    def ask_release(self, *tags: str) -> ControlReply:
        self.occupation.on_message(ReleaseMemory("r", tags))
        return self.replies.pop("r")

    def ask_resume(self, *tags: str) -> ControlReply | None:
        self.occupation.on_message(ResumeMemory("r", tags))
        return self.replies.pop("r", None)


def test_memory_goes_only_when_no_request_lives_and_prefixes_go_with_it() -> None:
    rig = Released()
    rig.ask("a", PROMPTS["a"])
    rig.turn()
    refused = rig.ask_release()
    assert (refused.ok, refused.status, refused.message) == (False, 409, "a request lives; nothing was released")
    assert rig.kv.asked == [] and not rig.weights.released and rig.occupation.refusal is None
    rig.settle()
    assert rig.scheduler.memory.cache.num_pages > 0
    released = rig.ask_release()
    assert released.ok and released.values == {"released": "kv_cache,weights"}
    assert rig.kv.asked == ["release"] and rig.weights.released and rig.scheduler.memory.cache.num_pages == 0
    refusal = rig.occupation.refusal
    assert refusal is not None and refusal.status == 503 and "/resume_memory_occupation" in refusal.message
    assert rig.ask_release().ok and rig.kv.asked == ["release"], "released twice"


def test_weights_come_again_from_their_checkpoint() -> None:
    rig = Released()
    rig.ask_release()
    assert rig.ask_resume("kv_cache") is not None and rig.occupation.released == ["weights"]
    assert rig.ask_resume() is None, "weights are still being read"
    rig.weights.future.set_result("the same")
    rig.settle()
    assert rig.replies.pop("r").ok and rig.weights.taken == ["the same"] and rig.weights.model_path == "old"
    assert rig.kv.asked == ["release", "resume"] and rig.occupation.released == []
    assert rig.ask_resume() is not None, "nothing is released"


def test_other_weights_may_come_in_their_place() -> None:
    rig = Released()
    rig.ask_release("weights")
    rig.tell(UpdateWeights("u", "new"))
    rig.weights.future.set_result("others")
    rig.settle()
    assert rig.weights.model_path == "new" and rig.occupation.refusal is None


def test_a_checkpoint_that_is_gone_leaves_the_weights_released() -> None:
    rig = Released()
    rig.ask_release("weights")
    rig.ask_resume("weights")
    rig.weights.future.set_exception(OSError("no such file"))
    rig.settle()
    reply = rig.replies.pop("r")
    assert not reply.ok and "no such file" in reply.message and rig.occupation.released == ["weights"]


@pytest.mark.parametrize("call", ["release", "resume"])
def test_unknown_tags_are_refused(call: str) -> None:
    rig = Released()
    reply = getattr(rig, f"ask_{call}")("kv_cache", "kv")
    assert (reply.status, reply.message) == (400, f"tags: must be of {', '.join(TAGS)}, got 'kv'")
    assert rig.occupation.released == [] and rig.kv.asked == []


def test_kv_that_cannot_be_released_keeps_the_weights_too() -> None:
    rig = Released(FixedKV("it is registered"))
    reply = rig.ask_release()
    assert (reply.status, reply.message) == (400, "it is registered") and rig.occupation.released == []
    assert rig.ask_release("weights", "cuda_graph").ok and rig.occupation.released == ["weights"]
