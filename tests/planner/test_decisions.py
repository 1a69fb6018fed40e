"""The planner's pure parts by literals: step times, workloads, layouts, what is good, and the search."""

from itertools import pairwise
from typing import Any

import pytest

from deploy.bench.stats import RequestRecord
from deploy.bench.workload import TraceEntry
from engine.core.plan import Plan
from engine.parallel.process_groups import SMALL_NUMBERS
from planner.cluster import ClusterLayout, candidates, parse_layout
from planner.goodput import NEAR, Point, Search, SloTargets, point_of
from planner.step_time import SMALL_SUM, Efficiency, Fitted, Gpu, Roofline, Shape, StepLoad, load_of, shape_of
from planner.workload import FIRST_OWN, Lengths, from_lengths, from_trace
from service.flags import ConfigError
from tests.core.engine_in_a_test import plan_item
from tests.parallel.some_config import some_config

SLO = SloTargets(ttft_s=1.0, tpot_s=0.1, itl_s=None, share=0.9)


def test_load_counts_what_attention_looks_at() -> None:
    """A chunk of 3 after 10: its queries see 11, 12 and 13 keys. Two decodes read 8 and 21 tokens."""
    items = [
        plan_item(3, start=10, extend=True, sample=False),
        plan_item(2, start=0, extend=True),
        plan_item(1, start=7, extend=False),
        plan_item(1, start=20, extend=False),
    ]
    assert load_of(Plan(1, True, items)) == StepLoad(
        prefill_tokens=5,
        prefill_pairs=11 + 12 + 13 + 1 + 2,
        prefill_context=15,
        decodes=2,
        decode_context=29,
        samples=3,
    )


SHAPE = Shape(
    layer_params=10**9,
    head_params=10**8,
    weight_bytes=2_200_000_000,
    read_bytes=2_200_000_000,
    kv_bytes=10**5,
    pair_flops=10**6,
    element_bytes=2,
    layers=10,
    hidden=1000,
    vocab=10**5,
)
GPU = Gpu(name="x", tflops=2, memory_gb=1, memory_gb_s=100, link_gb_s=1, peer_gb_s=10)
DECODES = StepLoad(decodes=4, decode_context=1000, samples=4)
PROMPT = StepLoad(prefill_tokens=1000, prefill_pairs=500_500, prefill_context=1000, samples=1)


def test_roofline_over_several_gpus_adds_up_hidden_states() -> None:
    """21 sums: of 4 tokens, three partials of 1000 float32 come in; of 1000, 3/4 in float32 and 3/4 rounded. A gather besides."""
    efficiency = Efficiency(compute=0.5, memory=0.5, step_s=0.001, reduce_s=1e-5)
    time = Roofline(gpu=GPU, shape=SHAPE, efficiency=efficiency, tp=4)
    alone = Roofline(gpu=GPU, shape=SHAPE, efficiency=efficiency)
    small_s, large_s = 3 * 4 * 4 * 1000 / 5e9 + 1e-5, 0.75 * 6 * 1000 * 1000 / 5e9 + 1e-5
    for load, sum_s, samples in ((DECODES, small_s, 4), (PROMPT, large_s, 1)):
        gather_s = samples * 4 * 75_000 / 5e9 + 1e-5
        assert time.seconds(load) == pytest.approx(alone.seconds(load) + 21 * sum_s + gather_s)
    assert SMALL_SUM == SMALL_NUMBERS


def test_a_gpu_holds_its_share_and_a_kv_head_more_often_than_there_are() -> None:
    """8 heads, 4 KV heads of 16, hidden 64, intermediate 96, 4 layers, 272 words; two tables."""
    model = some_config()
    shapes = {tp: shape_of(model, tp) for tp in (1, 2, 4, 8)}
    assert [shape.kv_bytes for shape in shapes.values()] == [2 * 4 * 16 * heads * 2 for heads in (4, 2, 1, 1)]
    assert [shape.pair_flops for shape in shapes.values()] == [4 * 4 * 16 * heads for heads in (8, 4, 2, 1)]
    by_hand = 4 * 64 * (2 * 16 + 2 * 16 + 3 * 12)  # one head, one KV head, an eighth of the MLP
    assert shapes[8].layer_params == by_hand and shapes[8].head_params == 34 * 64
    assert shapes[8].weight_bytes == 2 * (by_hand + 2 * 34 * 64)
    assert shapes[1].layer_params == 2 * shapes[2].layer_params == 4 * shapes[4].layer_params < 8 * by_hand


def test_roofline_is_bound_by_memory_or_by_arithmetic() -> None:
    time = Roofline(gpu=GPU, shape=SHAPE, efficiency=Efficiency(compute=0.5, memory=0.5, step_s=0.001))
    read_s = 1.1e9 * 2 / 50e9
    assert time.seconds(DECODES) == pytest.approx(0.001 + read_s + 1000 * 1e5 / 50e9)
    assert time.seconds(PROMPT) == pytest.approx(0.001 + (1e9 * 1000 + 1e8) * 2 / 1e12 + 500_500 * 1e6 / 1e12)
    assert time.seconds(StepLoad()) == 0.0


def test_fitted_adds_decodes_to_a_prefill_step() -> None:
    time = Fitted(
        prefill_step_s=1, prefill_token_s=0.1, prefill_pair_s=0.01, decode_step_s=2, decode_request_s=0.5,
        decode_context_s=0.25,
    )  # fmt: skip
    prompt = StepLoad(prefill_tokens=10, prefill_pairs=55, prefill_context=10, samples=1)
    decode = StepLoad(decodes=3, decode_context=8, samples=3)
    mixed = StepLoad(prefill_tokens=10, prefill_pairs=55, prefill_context=10, decodes=3, decode_context=8, samples=4)
    assert [time.seconds(one) for one in (prompt, decode, mixed, StepLoad())] == pytest.approx([2.55, 5.5, 6.05, 0.0])


def entry(ms: float, length: int, *ids: int) -> TraceEntry:
    return TraceEntry(timestamp_ms=ms, input_length=length, output_length=3, hash_ids=ids)


def test_a_trace_keeps_prefixes_lengths_and_order() -> None:
    _, (first, second, third) = from_trace([entry(0, 1000, 7, 8), entry(10, 600, 7, 9), entry(20, 1100, 7, 8)], count=9)
    assert [one.input_len for one in (first, second, third)] == [1000, 600, 1100]
    assert first.tokens()[:512] == second.tokens()[:512] and first.tokens()[512] != second.tokens()[512]
    assert first.tokens() == third.tokens()[:1000]
    assert third.tokens()[1024:] == [FIRST_OWN + 2] * 76  # beyond the listed blocks: its own
    assert [one.at for one in (first, second, third)] == [0, 1, 2]


def test_arrivals_of_one_tick_are_spread_and_stretched_to_a_gap_of_one() -> None:
    _, found = from_trace([entry(ms, 10, 1) for ms in (0, 0, 0, 3000, 6000, 6000)], count=6)
    gaps = [b.at - a.at for a, b in pairwise(found)]
    assert sum(gaps) / 5 == pytest.approx(1.0) and gaps[0] == pytest.approx(gaps[3] / 3) and min(gaps) > 0


def test_a_plan_takes_the_middle_of_a_trace_and_remembers_what_came_before() -> None:
    history, found = from_trace([entry(i, 10 + i, i) for i in range(100)], count=20)
    assert [one.input_len - 10 for one in found] == list(range(40, 60))
    assert [one.input_len - 10 for one in history] == list(range(20, 40))


def test_distributions() -> None:
    lengths = Lengths(input_len=100, output_len=40, range_ratio=0.5, prefix_len=30, prefix_groups=2)
    found = from_lengths(lengths, count=400, seed=3)
    assert found == from_lengths(lengths, count=400, seed=3) != from_lengths(lengths, count=400, seed=4)
    assert {50, 100} <= {one.input_len for one in found} <= set(range(50, 101))
    assert found[0].tokens()[:30] == found[2].tokens()[:30] != found[1].tokens()[:30]
    assert found[0].tokens()[30] != found[2].tokens()[30]
    assert found[-1].at / 399 == pytest.approx(1.0, rel=0.15)


def test_layouts() -> None:
    assert parse_layout("2p3D") == ClusterLayout(prefill=2, decode=3) and parse_layout("4U-mixed").mixed
    pool = parse_layout("2P1D3U-mixed-tp2")
    assert pool == ClusterLayout(prefill=2, decode=1, unified=3, mixed=True, tp=2)
    assert pool.name == "2P1D3U-mixed-tp2" and pool.num_gpus == 12 and len(pool.roles) == 6
    for layout in candidates(4):
        assert parse_layout(layout.name) == layout and layout.num_workers == 4 == len(layout.roles)
    assert [layout.name for layout in candidates(3)] == ["3U", "3U-mixed", "1P2D", "2P1D"]


def test_degrees_of_tensor_parallelism_are_compared_on_as_many_gpus() -> None:
    layouts = candidates(2, tps=(2, 3, 4))  # 8 GPUs; threes do not fill them
    assert {layout.num_gpus for layout in layouts} == {8} and {layout.tp for layout in layouts} == {2, 4}
    assert [layout.name for layout in layouts if layout.tp == 4] == ["2U-tp4", "2U-mixed-tp4", "1P1D-tp4"]
    for layout in layouts:
        assert parse_layout(layout.name) == layout


@pytest.mark.parametrize(
    "text", ["", "P", "0P1D", "1P", "2U-x", "1P1U", "1U1P1D", "-1U", "1000U", "2U-tp", "2U-tp0", "2U-tp33"]
)
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--layouts .*: write 2P3D"):
        parse_layout(text)


def answered(**changed: Any) -> RequestRecord:
    fields: dict[str, Any] = {"ttft_s": 0.9, "e2e_s": 0.9 + 10 * 0.1, "output_tokens": 11, "itl_s": [0.1] * 10}
    return RequestRecord(idx=0, sent_s=0.0, **fields | changed)


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"ttft_s": 1.1}, False),
        ({"e2e_s": 0.9 + 10 * 0.11}, False),
        ({"error": "late"}, False),
        ({"ttft_s": None}, False),
        ({"output_tokens": 1, "itl_s": []}, True),
    ],
)
def test_what_a_good_request_is(changed: dict[str, Any], good: bool) -> None:
    assert SLO.is_met_by(answered(**changed)) == good


def test_gaps_count_where_asked_for() -> None:
    strict = SloTargets(ttft_s=1.0, tpot_s=0.1, itl_s=0.15, share=0.9)
    assert strict.is_met_by(answered(itl_s=[0.1] * 19 + [9.0])) and not strict.is_met_by(
        answered(itl_s=[0.1] * 8 + [0.2] * 2)
    )


def test_a_point_judges_all_but_the_first_tenth() -> None:
    records = [answered(ttft_s=9.0)] * 2 + [answered(ttft_s=2.0)] * 3 + [answered()] * 15
    point = point_of(records, rate=2.0, slo=SLO, busy={})
    assert point.good_share == pytest.approx(15 / 18) and point.goodput == pytest.approx(2.0 * 15 / 18)


def point(rate: float, share: float) -> Point:
    return Point(
        rate=rate, good_share=share, ttft_s=None, tpot_s=None, ttft_p50_s=None, tpot_p50_s=None, cached_share=0.0,
        busy={}, errors={},
    )  # fmt: skip


@pytest.mark.parametrize("truth", [0.013, 0.9, 1.0, 1.1, 37.0])
def test_the_search_finds_the_highest_good_rate(truth: float) -> None:
    search = Search(guess=1.0, share=0.9)
    while (rate := search.next_rate()) is not None:
        search.points.append(point(rate, 0.95 if rate <= truth else 0.5))
    assert search.best is not None and truth / NEAR <= search.best.rate <= truth
    assert len(search.points) <= 14


def test_a_search_gives_up_below_a_part_of_its_guess() -> None:
    search = Search(guess=2.0, share=0.9, lowest=0.4)
    while (rate := search.next_rate()) is not None:
        search.points.append(point(rate, 0.0))
    assert [point.rate for point in search.points] == [2.0, 1.0, 0.8]


def test_a_good_rate_above_a_bad_one_is_chance() -> None:
    search = Search(guess=1.0, share=0.9)
    for rate, share in ((1.0, 0.95), (2.0, 0.8), (3.0, 0.91)):
        search.points.append(point(rate, share))
    assert search.best is not None and search.best.rate == 1.0
