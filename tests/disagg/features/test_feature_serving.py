"""What an encoder refuses of its peers, with a message, and what it refuses its own frontend."""

import random
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from disagg.features.feature_serving import FeatureServer
from disagg.features.recompute import packed
from engine.images import ImageInput
from tests.core.engine_in_a_test import request_of
from tests.core.mem_cache.images import image
from tests.disagg.features.feature_roles import PAGE, SEEN, EncodeCluster
from tests.disagg.two_roles import part_of
from transfer_backends.contract import TargetPages, Work
from transfer_backends.ports import KVReceiver
from transfer_backends.sides import KVPoll

GOOD = image(1, at=0)


def work_of(images: Sequence[ImageInput], num_tokens: int | None = None) -> Work:
    count = sum(shown.num_tokens for shown in images) if num_tokens is None else num_tokens
    return Work(tokens=[0] * count, images=packed(images))


RNG = random.Random(1)


def provided(cluster: EncodeCluster, work: Work, *, number: int = 0, pages: Sequence[int] | None = None) -> KVReceiver:
    """A peer's receiver, which has given its pages and row `number`."""
    receiver = cluster.wire.receiver(900 + number, 1)
    while receiver.poll() is not KVPoll.WaitingForInput:
        assert cluster.wire.step(RNG)
    receiver.provide(TargetPages(pages or [1 + 2 * number, 2 + 2 * number], number, work=work))
    return receiver


def settle(cluster: EncodeCluster) -> None:
    while cluster.wire.step(RNG) or cluster.encoder.turn() or cluster.encoder.role.waits_for_outside():
        pass


def asked(cluster: EncodeCluster, work: Work, *, pages: Sequence[int] = (1, 2)) -> KVReceiver:
    """What a peer's receiver is like once nothing moves any more."""
    receiver = provided(cluster, work, pages=pages)
    settle(cluster)
    return receiver


def assert_unharmed(cluster: EncodeCluster) -> None:
    """The next prompt is served."""
    cluster.ask("good", GOOD)
    cluster.run()
    assert cluster.counter("features_fetched") == 1
    cluster.assert_all_back()


WRONG: dict[str, tuple[Work, str]] = {
    "no image": (Work(tokens=[1, 2, 3]), "images: an encode worker computes one at a time"),
    "two images": (work_of([GOOD, replace(GOOD, start=6)]), "images: an encode worker computes one at a time"),
    "text before it": (work_of([replace(GOOD, start=1)], 7), "images: an encode worker computes one at a time"),
    "text behind it": (work_of([GOOD], 7), "images: an encode worker computes one at a time"),
    "more tokens than it says": (work_of([GOOD], 3), "images: one at 0..6 of 3 tokens"),
    "fewer pixels": (work_of([replace(GOOD, pixels=GOOD.pixels[:-1])]), "other sizes than its tokens"),
    "another grid": (work_of([replace(GOOD, grid=(1, 4, 8))]), "other sizes than its tokens"),
    "a grid of nothing": (work_of([replace(GOOD, grid=(0, 4, 6))]), "other sizes than its tokens"),
    "a short key": (work_of([replace(GOOD, key=b"1")]), "other sizes than its tokens"),
    "no message": (Work(tokens=[0] * 6, images=b"\xc1"), "images: "),
    "one that is too large": (
        work_of([image(1, at=0, rows=10, columns=9)]),
        "--vlm-cache-size-mb of the encode worker",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_images_are_refused_by_name(what: str) -> None:
    cluster = EncodeCluster(pages=20)
    work, message = WRONG[what]
    receiver = asked(cluster, work)
    assert receiver.poll() is KVPoll.Failed and message in (receiver.failure() or ""), receiver.failure()
    assert cluster.encoder.role.counters()["features_refused"] == 1 and cluster.encoded() == (0, 0)
    assert_unharmed(cluster)


@pytest.mark.parametrize("pages", [(1,), (1, 2, 3)])
def test_other_pages_than_the_image_needs_are_refused(pages: Sequence[int]) -> None:
    cluster = EncodeCluster()
    receiver = asked(cluster, work_of([GOOD]), pages=pages)
    assert receiver.poll() is KVPoll.Failed and "pages" in (receiver.failure() or "")
    assert_unharmed(cluster)


def test_a_model_that_sees_nothing_encodes_nothing() -> None:
    cluster = EncodeCluster()
    server = part_of(cluster.encoder.role, FeatureServer)
    server._bounds = type(SEEN)(vocab_size=SEEN.vocab_size, context_length=SEEN.context_length)
    receiver = asked(cluster, work_of([GOOD]))
    assert receiver.poll() is KVPoll.Failed and "this model sees none" in (receiver.failure() or "")


def drained(cluster: EncodeCluster) -> None:
    cluster.encoder.role.close_to_peers("the worker is draining")


def full(cluster: EncodeCluster) -> None:
    object.__setattr__(cluster.encoder.scheduler.limits, "max_queued_requests", -4)  # as many as may run


@pytest.mark.parametrize(("close", "why"), [(drained, "the worker is draining"), (full, "the queue is full")])
def test_an_encoder_that_takes_no_more_says_why(close: Callable[[EncodeCluster], None], why: str) -> None:
    cluster = EncodeCluster()
    close(cluster)
    receiver = asked(cluster, work_of([GOOD]))
    assert receiver.poll() is KVPoll.Failed and why in (receiver.failure() or "")


def test_equal_images_of_two_peers_are_encoded_once() -> None:
    """Also where the second comes while the first is being encoded."""
    cluster = EncodeCluster()
    cluster.encoder.lag = True
    cluster.encoder.depth = 2
    receivers = []
    for number in range(2):
        receivers.append(provided(cluster, work_of([GOOD]), number=number))
        while cluster.wire.step(RNG):
            pass
        cluster.encoder.turn()
    settle(cluster)
    assert [receiver.poll() for receiver in receivers] == [KVPoll.Success] * 2
    counters = cluster.encoder.role.counters()
    assert (counters["mm_cache_queries"], counters["mm_cache_hits"]) == (2, 1)
    places = [(page, at) for page in (1, 2) for at in range(PAGE)][: GOOD.num_tokens]
    arrivals = cluster.engine.model.arrivals
    landed = [[arrivals[page + 2 * number, at].value for page, at in places] for number in range(2)]
    assert landed == [cluster.encoder.model.features_of(GOOD)] * 2


def test_a_step_encodes_several_images_within_its_budget() -> None:
    """Of 64 tokens, of which an image of 6 takes 6 to encode, and 8 for its pages."""
    cluster = EncodeCluster()
    object.__setattr__(cluster.encoder.scheduler.limits, "max_running_requests", 8)
    for number in range(6):
        provided(cluster, work_of([image(number, at=0)]), number=number)
    settle(cluster)
    assert [len(plan.encodes) for plan in cluster.encoder.plans if plan.items] == [4, 2]


def test_work_that_ends_is_ended_for_peers() -> None:
    cluster = EncodeCluster()
    cluster.ask("a", GOOD)
    while not cluster.encoder.role.waits_for_outside():
        cluster.step(random.Random(1))
    cluster.encoder.role.end_peers_work("all requests were aborted")
    cluster.run()
    assert cluster.counter("feature_fetches_refused") == 1 and cluster.encoded()[1] == 1
    cluster.assert_all_back()


def test_prompts_are_refused() -> None:
    cluster = EncodeCluster()
    for request in (request_of([1, 2]), request_of([0] * 6, images=(GOOD,))):
        (output,) = cluster.encoder.role.add(request, 0.0)
        assert output.finish is not None and "this is an encode worker" in output.finish.message
    alone = request_of([0] * 6, images=(GOOD,), alone=True, max_new_tokens=0)
    cluster.encoder.say(cluster.encoder.role.add(alone, 0.0))
    cluster.encoder.run()
    assert cluster.encoder.finish["r"].kind == "length" and cluster.encoded() == (1, 0)
