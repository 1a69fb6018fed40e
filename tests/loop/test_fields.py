"""What a frontend sends reaches the scheduler whole: a new field of the message needs no copy on the way."""

from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import SamplingParams
from tests.core.hash_model import expected_tokens
from tests.loop.loop_in_a_test import LoopInATest


def test_a_request_of_the_scheduler_carries_the_message() -> None:
    rig, start = LoopInATest(), expected_tokens([1, 2, 3], 2)
    sampling = SamplingParams(max_new_tokens=6)
    message = GenerateRequest(
        "r",
        [1, 2, 3],
        sampling,
        logprobs=LogprobOptions(0),
        priority=4,
        namespace=("mine",),
        skip_cache_insert=True,
        output_ids=start,
    )
    rig.tell(message)
    request = rig.engine.scheduler.stages.live["r"]
    assert request.message is message and request.sampling is sampling and request.logprobs is message.logprobs
    assert request.output_ids[:2] == start and request.num_resumed == 2 and request.handed_tokens == 5
    assert not request.keep_kv and not request.wants_input_logprobs
    rig.turns(6)
    assert start + rig.engine.tokens["r"] == expected_tokens([1, 2, 3], 6)
    assert message.output_ids == start, "a message is not changed"
    rig.assert_all_back()
