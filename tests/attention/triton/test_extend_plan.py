"""How prompts are cut into programs: every row and token once, by a request's own lengths, enough of them for an H200."""

import random
from dataclasses import replace

import pytest

from engine.kernels.triton.extend_plan import (
    MAX_PARTS,
    MAX_SPANS,
    MAX_WHOLE,
    PROGRAMS,
    ExtendPlan,
    ExtendShape,
    SplitRound,
    plan_extend,
)

MULTIPROCESSORS = 132  # of an H200
QWEN3_8B = ExtendShape(group=4, kv_heads=8, rows=128, block=64)
SHAPES = [
    QWEN3_8B,
    ExtendShape(group=7, kv_heads=4, rows=128, block=64),
    ExtendShape(group=8, kv_heads=1, rows=16, block=32),
]


def split(plan: ExtendPlan) -> list[int]:
    return [x for now in plan.rounds for x in now.split]


def in_groups(flat: list[int], size: int) -> list[tuple[int, ...]]:
    return list(zip(*[iter(flat)] * size, strict=True))


def test_a_turn_behind_a_long_context_fills_the_device_and_reads_it_once_a_tile() -> None:
    plan = plan_extend([50], [32768], QWEN3_8B)
    programs = len(split(plan)) // 5 * QWEN3_8B.kv_heads
    assert MULTIPROCESSORS <= programs <= PROGRAMS
    assert not plan.whole
    tiles = 2  # 50 tokens of 4 heads in 128 rows
    read = sum(end - begin for _, _, begin, end, _ in in_groups(split(plan), 5))  # of one kv head
    assert tiles * (32768 - 50) < read <= tiles * 32768


def test_a_long_prompt_is_whole() -> None:
    plan = plan_extend([8192], [8192], QWEN3_8B)
    assert in_groups(plan.whole, 2) == [(0, tile) for tile in reversed(range(64))]
    assert plan == ExtendPlan(whole=plan.whole)
    assert plan_extend([2048], [131072], QWEN3_8B).rounds == []


def test_a_library_takes_long_prompts_alone() -> None:
    q_lens, kv_lens = [8192, 50, MAX_WHOLE, 3000], [8192, 32768, MAX_WHOLE, 131072]
    plan = plan_extend(q_lens, kv_lens, QWEN3_8B, has_library=True)
    assert plan.library == [0, 3]
    assert set(split(plan)[::5]) == {1} and set(plan.whole[::2]) == {2}
    assert plan_extend(q_lens, kv_lens, QWEN3_8B).library == []


@pytest.mark.parametrize("kv_len", [1, 50, MAX_WHOLE])
def test_a_short_context_is_whole(kv_len: int) -> None:
    assert plan_extend([1], [kv_len], QWEN3_8B).rounds == []
    assert plan_extend([1], [MAX_WHOLE + 1], QWEN3_8B).rounds


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_meets_every_token_once(shape: ExtendShape) -> None:
    rng = random.Random(1)
    for _ in range(200):
        q_len = rng.choice([1, 2, 50, rng.randint(1, 3000)])
        kv_len = q_len + rng.choice([0, 1, 5000, rng.randint(0, 40000)])
        plan = plan_extend([q_len], [kv_len], shape)
        if plan.whole:
            assert sorted(plan.whole[1::2]) == list(range(-(-q_len // shape.rows)))
            assert not plan.rounds
            continue
        (now,) = plan.rounds
        check_split(now, q_len, kv_len, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_meets_the_tokens_of_its_window_once(shape: ExtendShape) -> None:
    rng = random.Random(3)
    split = 0
    for _ in range(200):
        q_len, window = rng.choice([1, 2, 50, rng.randint(1, 600)]), rng.choice([1, 128, 4096, rng.randint(1, 9000)])
        kv_len = q_len + rng.choice([0, 1, 5000, rng.randint(0, 40000)])
        plan = plan_extend([q_len], [kv_len], replace(shape, window=window))
        if plan.whole:
            assert sorted(plan.whole[1::2]) == list(range(-(-q_len // shape.rows)))
            continue
        split += 1
        check_split(plan.rounds[0], q_len, kv_len, replace(shape, window=window))
    assert split > 20


def test_a_window_bounds_the_work_of_a_turn() -> None:
    plan = plan_extend([50], [131072], replace(QWEN3_8B, window=4096))
    read = sum(end - begin for _, _, begin, end, _ in in_groups(split(plan), 5))
    assert read <= 2 * (4096 + 50 + QWEN3_8B.block)  # of two tiles
    assert plan_extend([50], [131072], replace(QWEN3_8B, window=1024)).rounds == []


def check_split(now: SplitRound, q_len: int, kv_len: int, shape: ExtendShape) -> None:
    group, kv_heads, rows, window = shape.group, shape.kv_heads, shape.rows, shape.window
    assert len(now.split) // 5 * kv_heads <= PROGRAMS + kv_heads * -(-q_len * group // rows)
    units = in_groups(now.split, 5)
    taken: list[int] = []
    covered = 0
    for _, tile, part_row, spans in in_groups(now.merges, 4):
        height = min(rows, q_len * group - tile * rows)
        assert 1 <= spans <= MAX_SPANS and height <= now.most_rows
        mine = [(begin, end, at) for _, other, begin, end, at in units if other == tile]
        last = kv_len - q_len + (tile * rows + height - 1) // group
        low = max(0, kv_len - q_len + tile * rows // group + 1 - window) if window else 0
        assert [begin for begin, _, _ in mine] == [mine[0][0], *(end for _, end, _ in mine[:-1])]
        assert mine[0][0] <= low < mine[0][1], "the first span, by which the kernel knows where sinks join"
        assert mine[-1][1] == last + 1 and len(mine) == spans
        assert all(begin % shape.block == 0 and begin < end for begin, end, _ in mine)
        assert [at for _, _, at in mine] == [part_row + i * height for i in range(spans)]
        taken += [at + row for _, _, at in mine for row in range(height)]
        covered += height
    assert covered == q_len * group
    assert sorted(taken) == list(range(now.part_rows))


def test_a_request_is_cut_alike_in_any_batch() -> None:
    rng = random.Random(2)
    kv_lens = [rng.randint(1, 40000) for _ in range(20)]
    q_lens = [rng.randint(1, min(n, rng.choice([1, 60, 3000]))) for n in kv_lens]
    whole = plan_extend(q_lens, kv_lens, QWEN3_8B)
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        alone = plan_extend([q_len], [kv_len], QWEN3_8B)
        assert [unit[1:4] for unit in in_groups(split(whole), 5) if unit[0] == i] == [
            unit[1:4] for unit in in_groups(split(alone), 5)
        ]
        assert [unit[1] for unit in in_groups(whole.whole, 2) if unit[0] == i] == alone.whole[1::2]
    assert whole.rounds and whole.whole


def test_parts_of_many_requests_share_bounded_memory() -> None:
    plan = plan_extend([50] * 64, [32768] * 64, QWEN3_8B)
    assert split(plan)[::5] == sorted(split(plan)[::5]) and set(split(plan)[::5]) == set(range(64))
    for now in plan.rounds:
        assert now.part_rows * QWEN3_8B.kv_heads <= MAX_PARTS
        at = [(part_row, tile, end - begin) for _, tile, begin, end, part_row in in_groups(now.split, 5)]
        assert min(at)[0] == 0 and len({part_row for part_row, _, _ in at}) == len(at)
    assert len(plan.rounds) < 20
    for shape in SHAPES:  # of one request
        for q_len in (1, 33, 528):
            rounds = plan_extend([q_len], [200000], shape).rounds
            assert all(now.part_rows * shape.kv_heads <= PROGRAMS * shape.rows < MAX_PARTS for now in rounds)
