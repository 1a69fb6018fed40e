"""Requests with images between the two roles: handed over, retracted, moved on by prefixes, in one thread."""

import random
from contextlib import nullcontext
from math import prod

import msgspec
import pytest

from disagg.features.recompute import Bounds, Recomputes, fits, images_of, packed
from engine.images import ImageInput
from tests.core.hash_model import VOCAB, expected_tokens
from tests.core.mem_cache.images import SEES, TOWER, image, prompt_of, read_of
from tests.disagg.prefix_roles import PrefixCluster
from tests.disagg.two_roles import Cluster, part_of
from transfer_backends.contract import Work
from transfer_backends.wire import MAX_IMAGE_BYTES, Recompute, decode, encode

BOUNDS = Bounds(vocab_size=VOCAB, context_length=10_000, vision=SEES)
NEW = 20


def seeing(**more: object) -> Cluster:
    """Six requests with two images each, and memory of the decode engine for the growth of three."""
    cluster = Cluster(
        pages=(200, 24),
        both={"image_room": 16},
        conservativeness=0.0,
        resume_elsewhere=True,
        **more,  # type: ignore[arg-type]
    )
    part_of(cluster.prefill.role, Recomputes)._bounds = BOUNDS
    for number in range(6):
        shown = shown_by(number)
        cluster.submit(f"r{number}", prompt_of(*shown), number + 1, new=NEW, images=shown)
    return cluster


def shown_by(number: int) -> tuple[ImageInput, ...]:
    """Images of one key have one size."""
    return image(number % 4, at=1), image(4 + number % 3, at=9, rows=3)


def assert_right(cluster: Cluster) -> None:
    right = {f"r{number}": expected_tokens(read_of(*shown_by(number)), NEW) for number in range(6)}
    assert cluster.decode.tokens == right
    cluster.assert_all_back()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_decode_retracts_prefill_computes_again_from_the_same_images(depth: int) -> None:
    cluster = seeing(depth=depth)
    cluster.run(random.Random(depth))
    assert_right(cluster)
    assert cluster.decode.role.counters()["resumed_through_prefill"] > 0
    assert not any(plan.encodes for plan in cluster.decode.plans)


def test_where_images_are_too_many_for_a_message_decode_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.features.recompute.MAX_IMAGE_BYTES", 600)
    cluster = seeing()
    cluster.run(random.Random(1))
    assert_right(cluster)
    counters = cluster.decode.role.counters()
    assert counters.get("resumed_through_prefill", 0) == 0 and cluster.decode.scheduler.counters.resumed_computed > 0
    assert any(plan.encodes for plan in cluster.decode.plans)


def test_images_go_through_the_wire_as_they_are() -> None:
    shown = shown_by(1)
    message = Recompute("a", "b", 1, 1, b"", 0, b"\0" * 80, 0, 0, True, images=packed(shown))
    arrived = decode(encode(message))
    assert isinstance(arrived, Recompute)
    assert images_of(Work(tokens=prompt_of(*shown), images=arrived.images), BOUNDS) == shown
    assert packed(()) == b"" and images_of(Work(tokens=[1]), BOUNDS) == ()


def test_no_message_is_longer_than_its_bound() -> None:
    large = msgspec.structs.replace(image(1, at=0), pixels=bytes(MAX_IMAGE_BYTES))
    assert not fits([large])
    most = msgspec.structs.replace(image(1, at=0), pixels=bytes(MAX_IMAGE_BYTES // 2 - 256))
    assert fits([most, most]) and len(packed([most, most])) <= MAX_IMAGE_BYTES


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("of 20 tokens", {"start": 15}),
        ("other sizes", {"pixels": b"short"}),
        ("other sizes", {"num_tokens": 5}),
        ("other sizes", {"grid": (1, 4, 8)}),
        ("other sizes", {"grid": (2, 4, 6)}),
        ("other sizes", {"merge": 1}),
        ("other sizes", {"key": b"short"}),
        ("other sizes", {"size": (1, 6, 4)}),
        ("other sizes", {"time_step": 0}),
    ],
)
def test_images_of_peers_are_checked(why: str, changed: dict[str, object]) -> None:
    shown = msgspec.structs.replace(image(1, at=3), **changed)
    with pytest.raises(ValueError, match=why):
        images_of(Work(tokens=[1] * 20, images=packed([shown])), BOUNDS)


def test_images_of_peers_keep_to_the_positions_of_the_context() -> None:
    """Those of a video go on by its time."""
    still = image(1, at=3)
    size = (2 * TOWER.temporal_patch, *still.size[1:])
    video = msgspec.structs.replace(
        still, num_tokens=12, grid=(2, *still.grid[1:]), size=size, pixels=bytes(prod(size) * 3)
    )
    for time_step, why in ((80, None), (90, "time exceeds")):
        work = Work(tokens=[1] * 20, images=packed([msgspec.structs.replace(video, time_step=time_step)]))
        with nullcontext() if why is None else pytest.raises(ValueError, match=why):
            images_of(work, Bounds(VOCAB, 98, SEES))


def test_images_that_are_none_or_that_nothing_here_sees_are_refused() -> None:
    twice = packed([image(1, at=3), image(2, at=8)])
    for work, bounds, why in (
        (Work(tokens=[1] * 20, images=b"\xc1"), BOUNDS, "images: "),
        (Work(tokens=[1] * 20, images=twice), BOUNDS, "behind 9"),
        (Work(tokens=[1] * 20, images=packed([image(1, at=3)])), Bounds(VOCAB, 100), "sees none"),
    ):
        with pytest.raises(ValueError, match=why):
            images_of(work, bounds)


def test_prefixes_of_other_workers_end_before_the_first_image() -> None:
    """The source has all of the prompt, with this image and with another one: what it sends has neither."""
    cluster = PrefixCluster(both={"image_room": 100}, of_source={"image_room": 100})
    shown = (image(1, at=42),)
    for others in (shown, (image(2, at=42),)):
        cluster.warm(prompt_of(*others, length=70), images=others)
    cluster.ask("a", prompt_of(*shown, length=70), 1, known=68, images=shown)
    cluster.run(random.Random(1))
    assert cluster.decode.tokens == {"a": expected_tokens(read_of(*shown, length=70), 4)}
    assert cluster.counter("prefix_fetched_tokens") == 40
    cluster.assert_all_back()


def test_a_prompt_with_an_image_waits_for_no_fetch_of_its_placeholders() -> None:
    """A prompt of text that has the same token ids is another one."""
    cluster = PrefixCluster(both={"image_room": 100}, of_source={"image_room": 100})
    shown = (image(1, at=10),)
    tokens = prompt_of(*shown, length=70)
    cluster.warm(tokens)
    cluster.ask("text", tokens, 1, known=68)
    cluster.ask("sees", tokens, 2, known=68, images=shown)
    cluster.run(random.Random(2))
    right = {"text": expected_tokens(tokens, 4), "sees": expected_tokens(read_of(*shown, length=70), 4)}
    assert cluster.decode.tokens == right
    cluster.assert_all_back()
