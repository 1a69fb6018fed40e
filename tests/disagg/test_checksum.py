"""KV that is damaged on its way fails its own request alone, counted: roles, scheduler and hash model."""

import random
from collections.abc import Callable, Sequence

import pytest

from disagg.metadata import FirstToken, KVCorrupt, MetadataBuffers, verified
from engine.core.plan import ItemResult
from service.kv_layout import layout_conflict
from tests.core.hash_model import HashModel, Slot, expected_tokens
from tests.disagg.test_resumption import assert_right, resumed
from tests.disagg.two_roles import Cluster, crowded
from transfer_backends.contract import KVArgs, Region, Tail
from transfer_backends.wire import layout_of

ROOM = Region(1 << 20, 8, 64, None)
EMPTY, DAMAGED = Slot(0, 0), Slot(7, 7)


class Checksums:
    """Checksums of the tokens in the model's pages. Each is there at the third call."""

    def __init__(self, model: HashModel) -> None:
        self._model = model

    def __call__(self, pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Callable[[], int | None]:
        size, missing = self._model.page_size, -(num_tokens or 0) % self._model.page_size
        slots = [(page, offset) for page in pages for offset in range(size)][: len(pages) * size - missing]
        value = sum(i * (self._model.kv.get(slot, EMPTY).value % 1000003) for i, slot in enumerate(slots, 1))
        answers = iter((None, None))
        return lambda: next(answers, value)


def checked_cluster() -> Cluster:
    return with_checksums(Cluster(pages=(90, 90)))


def with_checksums(cluster: Cluster) -> Cluster:
    source, target = cluster.prefill.model, cluster.decode.model

    def copy_whole(src: Sequence[int], dst: Sequence[int]) -> None:
        """As engines do: what was never written, too."""
        for s, d in zip(src, dst, strict=True):
            for offset in range(4):
                target.kv[d, offset] = source.kv.get((s, offset), EMPTY)

    cluster.wire.copy_pages = copy_whole  # type: ignore[method-assign]
    for rows, model in zip(cluster.wire.rows, (source, target), strict=True):
        rows.checksum = Checksums(model)
    return cluster


@pytest.mark.parametrize("which", [0, 3])
def test_a_damaged_page_fails_that_request_alone_and_is_counted(which: int) -> None:
    cluster = checked_cluster()
    prompts = {f"r{room}": [room, *range(12)] for room in range(1, 5)}
    for room, (rid, prompt) in enumerate(prompts.items(), 1):
        cluster.submit(rid, prompt, room, new=4)
    whole, copied = cluster.wire.copy_pages, list[int]()

    def damage(src: Sequence[int], dst: Sequence[int]) -> None:
        whole(src, dst)
        copied.extend(dst)
        if len(copied) - 1 == which:
            cluster.decode.model.kv[dst[0], 0] = DAMAGED

    cluster.wire.copy_pages = damage  # type: ignore[method-assign]
    cluster.run(random.Random(1))
    bad = [rid for rid, finish in cluster.decode.finish.items() if finish.kind == "abort"]
    assert len(bad) == 1
    reason = cluster.decode.finish[bad[0]]
    assert reason.status == 500 and "corrupted" in reason.message and cluster.decode.tokens.get(bad[0], []) == []
    good = {rid: expected_tokens(prompt, 4) for rid, prompt in prompts.items() if rid not in bad}
    assert {rid: cluster.decode.tokens[rid] for rid in good} == good
    counters = cluster.decode.role.counters()
    assert (counters["kv_checksum_failed"], counters["kv_checksum_verified"]) == (1, 3)
    cluster.assert_all_back()


def test_bits_behind_the_last_token_of_a_page_do_not_count() -> None:
    """An earlier owner of decode's pages left other ones than of prefill's."""
    cluster = checked_cluster()
    source, target, copied = cluster.prefill.model, cluster.decode.model, list[int]()

    def copy_tokens(src: Sequence[int], dst: Sequence[int]) -> None:
        copied.extend(dst)
        for s, d in zip(src, dst, strict=True):
            for offset in range(4):
                target.kv[d, offset] = source.kv.get((s, offset), DAMAGED)

    cluster.wire.copy_pages = copy_tokens  # type: ignore[method-assign]
    cluster.submit("a", list(range(13)), 1, new=4)
    cluster.run(random.Random(1))
    assert len(copied) == 4 and cluster.decode.tokens["a"] == expected_tokens(list(range(13)), 4)
    assert cluster.decode.role.counters()["kv_checksum_verified"] == 1


def test_pages_leave_while_their_checksum_is_computed() -> None:
    """The row alone waits for it. The rate counts from the pages' departure."""
    cluster, copied = checked_cluster(), list[int]()
    whole, compute, ready = cluster.wire.copy_pages, cluster.wire.rows[0].checksum, list[bool]()
    assert compute is not None

    def copy(src: Sequence[int], dst: Sequence[int]) -> None:
        whole(src, dst)
        copied.extend(dst)

    def until_copied(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Callable[[], int | None]:
        assert compute is not None
        inner = compute(pages, tail, num_tokens)

        def value() -> int | None:
            ready.append(len(copied) == len(pages))
            return inner() if ready[-1] else None

        return value

    cluster.wire.copy_pages = copy  # type: ignore[method-assign]
    cluster.wire.rows[0].checksum = until_copied
    for room in (1, 2):
        cluster.submit(f"r{room}", [room, *range(12)], room, new=4)
        cluster.run(random.Random(1))
        assert cluster.decode.tokens[f"r{room}"] == expected_tokens([room, *range(12)], 4)
        copied.clear()
    assert ready[0] is False and cluster.decode.role.counters()["kv_checksum_verified"] == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_kv_that_prefill_recomputes_is_compared_too(damaged: bool) -> None:
    """Damaged, decode computes it itself: nobody hears of it."""
    cluster, prompts = crowded()
    with_checksums(cluster)
    whole, decode = cluster.wire.copy_pages, cluster.decode

    def damage(src: Sequence[int], dst: Sequence[int]) -> None:
        whole(src, dst)
        if damaged and decode.role.queues()["resuming"]:
            for page in dst:
                decode.model.kv[page, 0] = DAMAGED

    cluster.wire.copy_pages = damage  # type: ignore[method-assign]
    rng = random.Random(7)
    while not cluster.at_rest():
        cluster.turn(rng)
    finished = [rid for rid, finish in decode.finish.items() if finish.kind == "length"]
    counters = decode.role.counters()
    if damaged:
        assert counters["kv_checksum_failed"] > 0 and counters.get("resumed_through_prefill", 0) == 0
        assert {rid: decode.tokens[rid] for rid in finished} == {
            rid: expected_tokens(prompts[rid], 24) for rid in finished
        }
        cluster.assert_all_back()
    else:
        assert_right(cluster, prompts)
        through, _ = resumed(cluster)
        assert through > 0 and counters["kv_checksum_verified"] == len(prompts) + through


@pytest.mark.parametrize("value", [None, 0, 1, -1, 2**63 - 1, -(2**63)])
def test_the_row_carries_it(value: int | None) -> None:
    rows = MetadataBuffers(1)
    row = rows.allocate()
    assert row == 0
    rows.write(row, room=5, first=FirstToken(ItemResult(token=3), cached_tokens=0, kv_checksum=value))
    first = rows.read(row, room=5)
    assert first.kv_checksum == value
    if value is not None:
        assert verified(first, lambda: value, num_pages=1) is first
    with pytest.raises(KVCorrupt, match="KV was corrupted"):
        verified(first, lambda: 7, num_pages=1)


def test_workers_that_differ_in_it_are_refused_at_the_handshake() -> None:
    layouts = [
        layout_of(KVArgs(ROOM, ROOM, "m", 16, "float32", name), backend="nixl") for name in ("off", "splitmix64")
    ]
    assert layout_conflict(layouts[0], layouts[0], me="decode", them="prefill") is None
    said = layout_conflict(layouts[0], layouts[1], me="decode", them="prefill")
    assert said is not None and "kv_checksum differs: decode has 'off', prefill has 'splitmix64'" in said
