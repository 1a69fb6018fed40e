"""What the goodput benchmark decides before and beside its clusters: rates, objectives, scaled requests, cores, and what is kept."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.goodput import page, results
from benchmarks.goodput.clusters import Watch
from benchmarks.goodput.layouts import LAYOUTS, Layout, flags_of, pinning
from benchmarks.goodput.loads import (
    LOADS,
    SHARE,
    Alone,
    from_entries,
    scaled,
    to_send,
)
from benchmarks.goodput.results import NEAR, STRIDE, Cell, Results
from deploy.bench.stats import RequestRecord
from deploy.bench.workload import TraceEntry
from planner.goodput import Point, SloTargets
from planner.workload import PlannedRequest

SLO = SloTargets(ttft_s=1.0, tpot_s=0.05, itl_s=0.05, share=SHARE)
PAIR = next(one for one in LAYOUTS if one.name == "pair")
POOL = next(one for one in LAYOUTS if one.kind == "mixed pool")


def named(name: str) -> Layout:
    return next(one for one in LAYOUTS if one.name == name)


def point(rate: float, share: float = 1.0) -> Point:
    return Point(
        rate=rate, good_share=share, ttft_s=0.2, tpot_s=0.02, ttft_p50_s=0.1, tpot_p50_s=0.01, cached_share=0.0,
        busy={}, errors={},
    )  # fmt: skip


def request(*blocks: tuple[int, int], output_len: int = 10, at: float = 0.0) -> PlannedRequest:
    return PlannedRequest(at=at, blocks=blocks, output_len=output_len)


# ---- the search


@pytest.mark.parametrize("wrong", [0.2, 0.5, 0.9, 1.0, 1.12, 1.8, 2.2])
def test_a_search_from_a_near_guess_ends_after_few_runs(wrong: float) -> None:
    cell = Cell(load="l", layout="x", guess=5.0 * wrong)
    search = cell.search(SLO)
    while (rate := search.next_rate()) is not None:
        search.points.append(point(rate, 1.0 if rate <= 5.0 else 0.5))
    assert search.best is not None and 5.0 / NEAR <= search.best.rate <= 5.0
    bad = min(one.rate for one in search.points if one.good_share < SLO.share)
    assert (search.best.rate * bad) ** 0.5 == pytest.approx(5.0, rel=NEAR - 1)
    assert len(cell.points) <= (4 if abs(wrong - 1) < STRIDE - 1 else 10)


def test_a_search_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    whole = Cell(load="l", layout="x", guess=5.0)
    search = whole.search(SLO)
    while (rate := search.next_rate()) is not None:
        search.points.append(point(rate, 1.0 if rate <= 4.1 else 0.5))
    for cut in range(len(whole.points)):
        kept = Results(
            environment={}, arguments={"cores": 2}, loads={}, cells=[replace(whole, points=whole.points[:cut])]
        )
        results.write(kept, tmp_path / "r.json")
        found = results.begin(tmp_path / "r.json", {}, {"cores": 2}, anew=False)
        again = found.cells[0].search(SLO)
        assert again.next_rate() == whole.points[cut].rate


# ---- objectives of a request


def answered(idx: int, *, ttft_s: float = 0.5, gaps: tuple[float, ...] = (0.01,) * 20) -> RequestRecord:
    return RequestRecord(
        idx=idx, sent_s=0.0, ttft_s=ttft_s, itl_s=list(gaps), e2e_s=ttft_s + sum(gaps), output_tokens=len(gaps) + 1
    )


def test_one_long_gap_in_twenty_is_forgiven_and_two_are_not() -> None:
    assert SLO.is_met_by(answered(0, gaps=(0.01,) * 20 + (0.3,)))
    assert not SLO.is_met_by(answered(0, gaps=(0.01,) * 19 + (0.3,) * 2))
    assert not SLO.is_met_by(answered(0, ttft_s=1.1))


def test_a_run_is_lost_with_the_first_miss_too_many_and_the_first_requests_do_not_count() -> None:
    """Of 100 requests 90 are judged, of which 4 may be late."""
    watch, late = Watch(count=100, slo=SLO), 2.0
    assert Watch(count=100, slo=SLO).max_misses == 4
    assert not any(watch.is_lost(answered(idx, ttft_s=late)) for idx in range(10))
    verdicts = [watch.is_lost(answered(idx, ttft_s=late if idx % 10 == 0 else 0.1)) for idx in range(10, 100)]
    assert verdicts.index(True) == 40
    kept = (90 - 4) / 90, (90 - 5) / 90
    assert kept[0] >= SHARE > kept[1]


def test_objectives_follow_the_machine_and_the_mean_prompt() -> None:
    load, source = LOADS[0], [request((7, 4000)), request((8, 12000))]
    requests = load.requests(source)
    slow = load.objectives(requests, Alone(prompt_token_s=0.001, step_s=0.02))
    assert slow.ttft_s == pytest.approx(load.ttft * 200 * 0.001, rel=0.06)
    assert slow.itl_s == slow.tpot_s == pytest.approx(load.itl * 0.02, rel=0.06)
    fast = load.objectives(requests, Alone(prompt_token_s=0.0005, step_s=0.01))
    assert fast.ttft_s == pytest.approx(slow.ttft_s / 2, rel=0.06) and fast.itl_s == pytest.approx(
        0.5 * slow.tpot_s, rel=0.06
    )


# ---- requests


def test_scaled_prompts_keep_their_common_prefix() -> None:
    one, other = request((5, 512), (6, 512), (9, 300)), request((5, 512), (6, 512), (7, 512), (8, 100))
    found = [scaled(each, prompts=0.1, answers=0.5) for each in (one, other)]
    assert [each.input_len for each in found] == [132, 164]
    assert found[0].blocks[:2] == found[1].blocks[:2] == ((5, 51), (6, 51))
    sent = to_send(found, rate=1.0, salt=1)
    common = sum(a == b for a, b in zip(sent[0].prompt, sent[1].prompt, strict=False))
    assert sent[0].prompt[:102] == sent[1].prompt[:102] and common < 120
    assert [each.output_len for each in found] == [5, 5]


def test_a_trace_s_middle_is_taken_a_mean_gap_apart() -> None:
    draw = random.Random(3)
    entries = [
        TraceEntry(timestamp_ms=3000.0 * (i // 3), input_length=draw.randint(1, 2000), output_length=5, hash_ids=(i,))
        for i in range(300)
    ]
    found = from_entries(entries, 30)
    assert [one.input_len for one in found] == [entry.input_length for entry in entries[135:165]]
    assert found[0].at == 0.0 and found[-1].at == pytest.approx(29.0)


def test_no_run_finds_the_prompts_of_another() -> None:
    one, other = (to_send([request((7, 64))], rate=1.0, salt=salt)[0] for salt in (1, 2))
    assert one.prompt != other.prompt and one.prompt_len == other.prompt_len == 64


# ---- cores


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_cluster_has_the_same_cores(count: int) -> None:
    cores = [3 * i + 1 for i in range(count)]
    found = [pinning(layout, cores) for layout in LAYOUTS]
    assert len({one.cores for one in found}) == 1 and len(found[0].cores) == count // 2 * 2
    for layout, one in zip(LAYOUTS, found, strict=True):
        if layout.is_unified or layout.shared:
            assert set(one.by_role.values()) == {one.cores} and one.threads == len(one.cores)
        else:
            prefill, decode = one.by_role["prefill"], one.by_role["decode"]
            assert not set(prefill) & set(decode) and {*prefill, *decode} == set(one.cores)
            assert one.threads == len(prefill) == len(decode)


def test_flags_tell_each_cluster_its_threads_and_the_load_s_limits() -> None:
    def flags(layout: Layout) -> str:
        return " ".join(flags_of(layout, SLO, threads=3, chunk=48))

    assert "--route auto" in flags(POOL) and "--route pair" in flags(PAIR)
    assert [one.name for one in LAYOUTS if "--enable-pdmux --num-threads 3 --pdmux-itl 0.05" in flags(one)] == [
        "unified, multiplexed"
    ]
    assert all("--num-threads 3" in flags(layout) for layout in LAYOUTS)
    assert [one.name for one in LAYOUTS if "--chunked-prefill-size 48" in flags(one)] == ["mixed chunk, tuned"]


# ---- the page


def test_the_committed_page_and_readme_are_written_from_the_figures() -> None:
    assert page.page_of(page.REPORT) == page.REPORT.with_suffix(".md").read_text()
    found = page.measured(page.REPORT)
    assert list(found) == ["goodput", "goodput_pdmux"]
    readme = page.README.read_text()
    assert page.with_block(readme, page.readme(found["goodput"])) == readme
