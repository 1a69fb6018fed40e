"""Gates: which layers of which pages may leave, when a room waits for compute, and what a second try sends. Pure cores."""

from dataclasses import replace

import numpy as np
import pytest

from tests.transfer.cores import ARGS, CONFIG, KEY, PAGES, SRC, JoinedCores
from transfer_backends.contract import NOTHING_YET, Gate, LayerGroup, Progress
from transfer_backends.prefill.inbox import Chunk, Post, num_groups, num_open
from transfer_backends.prefill.paths import FencePeer
from transfer_backends.sides import KVPoll

LAYERS = replace(ARGS, groups=(LayerGroup(2, 256), LayerGroup(3, 512), LayerGroup(7, 1024)))
STEP = 5
NO_PAGES = np.array([], np.int64)


@pytest.mark.parametrize(
    ("progress", "begun", "layers"),
    [
        (NOTHING_YET, 0, 0),
        (Progress(STEP - 1, 7), 0, 0),
        (Progress(STEP, 0), 1, 0),
        (Progress(STEP, 2), 1, 1),
        (Progress(STEP, 3), 1, 2),
        (Progress(STEP, 7), 1, 3),
        (Progress(STEP + 1, 0), 1, 3),
    ],
)
def test_what_a_gate_lets_through(progress: Progress, begun: int, layers: int) -> None:
    chunks = [Chunk(NO_PAGES, 0, None, Gate(STEP, by_layer)) for by_layer in (False, True)]
    assert [num_open(chunk, progress, LAYERS) for chunk in chunks] == [begun, layers]
    assert [num_groups(chunk, LAYERS) for chunk in chunks] == [1, 3]
    assert num_open(Chunk(NO_PAGES, 0, None), progress, LAYERS) == 1


def gated() -> JoinedCores:
    """All four pages are being written by step 5."""
    pair = JoinedCores(LAYERS, sends=False)
    pair.send(SRC, gate=Gate(STEP, by_layer=True))
    return pair


def spans(posts: list[Post]) -> list[tuple[int, int, int]]:
    """(source page, first byte in it, bytes) of every piece, which goes to the same place of decode's page."""
    found = []
    for src, dst, length in (
        (int(s), int(d), int(n))
        for p in posts
        for s, d, n in zip(p.pieces.src, p.pieces.dst, p.pieces.lengths, strict=True)
    ):
        (page, begin), (target, there) = (divmod(at - ARGS.kv.base_ptr, ARGS.kv.item_bytes) for at in (src, dst))
        assert begin == there and PAGES[SRC.index(page)] == target
        found.append((page, begin, length))
    return found


def test_each_group_of_layers_leaves_once_and_the_row_last() -> None:
    assert not JoinedCores(LAYERS, sends=False).core.has_chunks, "marks of layers would wake the sender for nothing"
    pair = gated()
    assert pair.posts() == [] and pair.states == (KVPoll.Transferring, KVPoll.WaitingForInput)
    for layers, begin, size in ((2, 0, 256), (3, 256, 256), (7, 512, 512)):
        assert pair.core.has_chunks
        pair.core.outbox.on_progress(Progress(STEP, layers), 1.0)
        posts = pair.posts()
        assert spans(posts) == [(page, begin, size) for page in SRC]
        for post in posts:
            pair.final(post, ok=True)
    assert pair.states == (KVPoll.Transferring, KVPoll.Transferring) and not pair.core.has_chunks
    pair.send([], start=4, row=1, now_s=2.0)
    (row,) = pair.posts()
    assert row.kv_bytes == 0
    pair.final(row, ok=True)
    assert pair.states == (KVPoll.Success, KVPoll.Success)  # decode counts pages, so all of them were counted


def test_what_is_written_long_ago_leaves_in_whole_pages() -> None:
    pair = gated()
    pair.core.outbox.on_progress(Progress(STEP + 1, 0), 1.0)
    assert spans(pair.posts()) == [(page, 0, 1024) for page in SRC]


def test_a_second_try_sends_all_layers_again_and_waits_for_the_others() -> None:
    pair = gated()
    pair.core.outbox.on_progress(Progress(STEP, 2), 1.0)
    for post in pair.posts():
        pair.final(post, ok=False)
    assert isinstance(pair.core.paths.commands.popleft(), FencePeer)
    pair.core.completions.on_fenced("d", ok=True, now_s=1.0)
    again = pair.posts()
    assert spans(again) == [(page, 0, 256) for page in SRC] and {post.write_try for post in again} == {1}
    pair.core.outbox.on_progress(Progress(STEP, 7), 1.0)
    assert spans(pair.posts()) == [(page, 256, 768) for page in SRC]


def test_a_long_step_is_no_stalled_transfer() -> None:
    """The clock of `transfer_timeout_s` runs while there is something to write."""
    pair = gated()
    late_s = 10 * CONFIG.transfer_timeout_s
    pair.core.check_deadline(pair.core.rooms.get(KEY), late_s)
    assert pair.states[0] is KVPoll.Transferring
    pair.core.outbox.on_progress(Progress(STEP, 2), late_s)
    assert pair.core.outbox.next_post(late_s) is not None
    pair.core.check_deadline(pair.core.rooms.get(KEY), late_s + 0.9 * CONFIG.transfer_timeout_s)
    assert pair.states[0] is KVPoll.Transferring
    pair.core.check_deadline(pair.core.rooms.get(KEY), late_s + CONFIG.transfer_timeout_s)
    assert pair.states[0] is KVPoll.Failed


def test_gates_that_could_never_open_are_refused() -> None:
    pair, gate = JoinedCores(LAYERS, sends=False), Gate(STEP, by_layer=True)
    with pytest.raises(ValueError, match="the last chunk has a gate"):
        pair.send(SRC, row=1, gate=gate)
    with pytest.raises(ValueError, match="nothing says where layers end"):
        JoinedCores(sends=False).send(SRC, gate=gate)
