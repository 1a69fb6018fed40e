"""Both roles, the production scheduler and the hash model in one thread: every interleaving a seed can draw."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.decode_role import DecodeRole
from disagg.metadata import MetadataBuffers
from disagg.prefill_role import PrefillRole
from engine.core.outputs import StepEffects
from engine.core.request import Request
from engine.messages import Bootstrap, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.disagg.wire_in_a_test import Wire


class RoleEngine(EngineInATest):
    """An engine under a role instead of alone."""

    role: PrefillRole | DecodeRole
    now_s = 0.0

    def submit(self, rid: str, prompt: list[int], room: int, *, new: int, prefill_only: bool, adapter: int = 0) -> None:
        request = Request(
            rid=rid,
            input_ids=prompt,
            sampling=SamplingParams(max_new_tokens=new),
            eos_ids=frozenset(),
            arrived_s=self.now_s,
            bootstrap=Bootstrap("127.0.0.1", 1, room),
            prefill_only=prefill_only,
            adapter=adapter,
        )
        self.say(self.role.add(request, self.now_s))

    def abort(self, rid: str) -> None:
        self.say(self.role.abort(rid, self.now_s))

    def turn(self) -> bool:
        self.say(self.role.poll(self.now_s))
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.fill_masks(plan)
            self.launched.append((plan, self.model.run(plan)))
        worked = bool(self.launched)
        if self.launched and (plan is None or len(self.launched) >= self.depth):
            done, result = self.launched.popleft()
            effects: StepEffects = self.scheduler.collect(done, result)  # type: ignore[arg-type]
            self.say(self.role.on_step(effects, self.now_s))
        self.scheduler.check()
        assert self.role.check() == []
        return worked


class Cluster:
    def __init__(
        self,
        *,
        pages: tuple[int, int],
        page_size: int,
        chunk: int,
        depth: int,
        rows: int = 3,
        places: int = 0,
        **decode: object,
    ) -> None:
        """`places`: adapters in a batch of either. `decode`: what decode alone is given."""
        make = {"page_size": page_size, "chunk": chunk, "depth": depth, "max_running": 4, "max_loras_per_batch": places}
        self.prefill = RoleEngine(num_pages=pages[0], **make)  # type: ignore[arg-type]
        self.decode = RoleEngine(num_pages=pages[1], **make, **decode)  # type: ignore[arg-type]
        rows_p, rows_d = MetadataBuffers(rows), MetadataBuffers(rows)
        self.wire = Wire(prefill=self.prefill.model, decode=self.decode.model, rows=(rows_p, rows_d))
        self.prefill.role = PrefillRole(
            scheduler=self.prefill.scheduler, manager=self.wire, metadata=rows_p, directory=self.wire, page_bytes=1
        )
        self.decode.role = DecodeRole(
            scheduler=self.decode.scheduler,
            manager=self.wire,
            metadata=rows_d,
            moves_bytes=True,
            prealloc_timeout_s=1000.0,
        )

    def submit(self, rid: str, prompt: list[int], room: int, *, new: int, adapter: int = 0) -> None:
        self.prefill.submit(rid, prompt, room, new=new, prefill_only=True, adapter=adapter)
        self.decode.submit(rid, prompt, room, new=new, prefill_only=False, adapter=adapter)

    def run(self, rng: random.Random, max_turns: int = 20_000) -> None:
        """Until nothing is left anywhere."""
        for _ in range(max_turns):
            moved = rng.random() < 0.7 and self.wire.step(rng)
            worked = self.prefill.turn() if rng.random() < 0.5 else self.decode.turn()
            if not moved and not worked and self.at_rest():
                return
        raise AssertionError(
            f"the cluster did not come to rest: {self.prefill.role.queues()} {self.decode.role.queues()}"
        )

    def at_rest(self) -> bool:
        engines = (self.prefill, self.decode)
        return not any(e.role.waits_for_outside() or e.launched or not e.scheduler.idle for e in engines)

    def assert_all_back(self) -> None:
        for engine in (self.prefill, self.decode):
            counts = engine.scheduler.memory.allocator.counts()
            assert counts["held"] == counts["quarantined"] == 0 and engine.role.check() == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_tokens_cross_two_engines(depth: int, page_size: int) -> None:
    cluster = Cluster(pages=(200, 200), page_size=page_size, chunk=8, depth=depth)
    prompts = {f"r{i}": [i, *range(3 + 7 * i)] for i in range(5)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.submit(rid, prompt, i + 1, new=6)
    cluster.run(random.Random(1))
    assert cluster.decode.tokens == {rid: expected_tokens(p, 6) for rid, p in prompts.items()}
    assert cluster.prefill.tokens == {rid: expected_tokens(p, 1) for rid, p in prompts.items()}
    cluster.assert_all_back()


@pytest.mark.parametrize("backup_pages", [0, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_retracted_requests_come_before_new_ones(depth: int, backup_pages: int) -> None:
    """Memory for the growth of two of six; none is reserved. While one is retracted nobody new gets pages."""
    cluster = Cluster(
        pages=(200, 16), page_size=4, chunk=8, depth=depth, backup_pages=backup_pages, conservativeness=0.0
    )
    prompts = {f"r{i}": [i, *range(8 + i)] for i in range(6)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.submit(rid, prompt, i + 1, new=24)
    rng, decode, retracted = random.Random(7), cluster.decode, 0
    while not cluster.at_rest():
        cluster.wire.step(rng)
        cluster.prefill.turn()
        before = decode.role.queues()
        decode.turn()
        if before["retracted"]:
            retracted += 1
            assert decode.role.queues()["prealloc"] == before["prealloc"]
    assert retracted > 0 and decode.scheduler.counters.retractions > 0
    assert decode.tokens == {rid: expected_tokens(p, 24) for rid, p in prompts.items()}
    saved = decode.role.counters()["backup_saved_tokens"]
    assert (saved > 0) == (backup_pages > 0) and decode.role.counters()["backup_restored_tokens"] == saved
    cluster.assert_all_back()


def test_wrong_kv_is_seen() -> None:
    """The check of this file can fail: without bytes the tokens are wrong."""
    cluster = Cluster(pages=(50, 50), page_size=4, chunk=8, depth=1)
    cluster.wire.copy_pages = lambda src, dst: cluster.decode.model.kv.update(  # type: ignore[method-assign]
        {(d, o): 0 for d in dst for o in range(4)}
    )
    cluster.submit("r", list(range(9)), 1, new=6)
    cluster.run(random.Random(1))
    assert cluster.decode.tokens["r"] != expected_tokens(list(range(9)), 6)


def test_a_prefill_abort_ends_both_sides() -> None:
    cluster = Cluster(pages=(50, 50), page_size=4, chunk=8, depth=1)
    cluster.submit("r", list(range(30)), 1, new=6)
    cluster.prefill.abort("r")
    cluster.run(random.Random(3))
    assert cluster.decode.finish["r"].kind == cluster.prefill.finish["r"].kind == "abort"
    assert "aborted" in cluster.decode.finish["r"].message
    cluster.assert_all_back()


def test_a_page_given_to_a_transfer_stays_in_quarantine_until_its_writer_is_done() -> None:
    cluster = Cluster(pages=(50, 50), page_size=4, chunk=8, depth=1)
    rng = random.Random(0)
    cluster.submit("r", list(range(30)), 1, new=6)
    while not cluster.wire.room(1).writes:
        cluster.wire.step(rng)
        cluster.prefill.turn()
        cluster.decode.turn()
    cluster.decode.abort("r")
    cluster.decode.turn()
    assert cluster.decode.scheduler.memory.allocator.counts()["quarantined"] == 8
    cluster.run(rng)
    cluster.assert_all_back()


def test_a_corrupt_metadata_row_fails_that_request_alone() -> None:
    cluster = Cluster(pages=(90, 90), page_size=4, chunk=8, depth=1)
    copy_row = cluster.wire.copy_row
    cluster.wire.copy_row = lambda src, dst: None if src == 0 else copy_row(src, dst)  # type: ignore[method-assign]
    cluster.submit("bad", list(range(9)), 1, new=3)
    cluster.submit("good", list(range(8)), 2, new=3)
    rng = random.Random(0)
    cluster.run(rng)
    kinds = {rid: finish.kind for rid, finish in cluster.decode.finish.items()}
    assert sorted(kinds.values()) == ["abort", "length"]
    cluster.assert_all_back()


def test_waiting_for_memory_has_an_end() -> None:
    cluster = Cluster(pages=(50, 20), page_size=4, chunk=8, depth=1)
    cluster.submit("big", list(range(60)), 1, new=6)
    for room in range(2, 6):
        cluster.submit(f"r{room}", list(range(40)), room, new=6)
    cluster.decode.turn()
    for engine in (cluster.prefill, cluster.decode):
        engine.now_s = 2000.0
    for room in range(1, 6):
        cluster.wire.room(room).to_decode[0]()
        cluster.wire.room(room).to_decode.popleft()
    cluster.decode.turn()
    late = [rid for rid, finish in cluster.decode.finish.items() if finish.status == 503]
    assert late == ["r2", "r3", "r4", "r5"]
    cluster.run(random.Random(0))
    cluster.assert_all_back()


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # prefix family
        st.integers(1, 30),  # prompt length
        st.integers(1, 12),  # max_new_tokens
        st.integers(0, 20),  # turns until the next arrival
        st.sampled_from(["", "prefill", "decode", "both"]),  # who aborts
        st.integers(0, 60),  # after so many turns
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    depth=st.integers(1, 2),
    page_size=st.sampled_from([1, 4]),
    capacity=st.integers(44, 150),
    backup_pages=st.sampled_from([0, 8, 1000]),
    conservativeness=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_aborts_at_any_moment_leave_nothing_behind(
    requests: list[tuple[int, int, int, int, str, int]],
    depth: int,
    page_size: int,
    capacity: int,
    backup_pages: int,
    conservativeness: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    pages = capacity // page_size
    cluster = Cluster(
        pages=(pages, pages),
        page_size=page_size,
        chunk=8,
        depth=depth,
        backup_pages=backup_pages,
        conservativeness=conservativeness,
    )
    aborts: dict[int, list[tuple[str, str]]] = {}
    turn = 0
    for i, (family, length, new, gap, who, when) in enumerate(requests):
        cluster.submit(f"r{i}", [(family * 7 + k) % 50 for k in range(length)], i + 1, new=new)
        aborts.setdefault(turn + when, []).append((who, f"r{i}"))
        for _ in range(gap):
            turn += 1
            cluster.wire.step(rng)
            rng.choice([cluster.prefill, cluster.decode]).turn()
            for who_now, rid in aborts.pop(turn, []):
                if who_now in ("prefill", "both"):
                    cluster.prefill.abort(rid)
                if who_now in ("decode", "both"):
                    cluster.decode.abort(rid)
    cluster.run(rng)
    cluster.assert_all_back()
    for i, (family, length, new, *_rest) in enumerate(requests):
        want = expected_tokens([(family * 7 + k) % 50 for k in range(length)], new)
        got, finish = cluster.decode.tokens[f"r{i}"], cluster.decode.finish[f"r{i}"]
        assert got == (want if finish.kind == "length" else want[: len(got)])
        assert f"r{i}" in cluster.prefill.finish
    _no_output_twice(cluster.decode.outputs)


def _no_output_twice(outputs: dict[str, list[TokenOutput]]) -> None:
    for said in outputs.values():
        counts = [output.completion_tokens for output in said if output.new_ids]
        assert counts == list(range(1, len(counts) + 1))
