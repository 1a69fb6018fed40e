"""What a planner must know of this machine, measured as docs/planning.md says: loads on unified workers, and a pair beside one.

Each kind of worker is measured on its own cores: one with the cores of half a pair, one with all. Two more figures belong to a machine
that all share: the CPU time of router and client, and how much longer steps take while the other cores compute.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.cluster import Cluster, load_records
from benchmarks.cpu_use import cpu_use
from benchmarks.goodput.layouts import LAYERWISE, LAYOUTS, Pinning, pinning
from benchmarks.goodput.loads import LONGEST, Alone
from benchmarks.goodput.measure import cpu_s, pinned
from deploy.bench.stats import RequestRecord
from planner.fit import fit, fit_handover
from planner.profile import Profile, describe
from planner.step_time import Beside, Fitted

ALONE = {"concurrency": 1, "num_requests": 32, "input_len": 1024, "random_range_ratio": 0.06, "output_len": 12}
TOGETHER = {"concurrency": 6, "num_requests": 24, "input_len": 320, "random_range_ratio": 0.2, "output_len": 48}
ANSWERS = {"concurrency": 4, "num_requests": 4, "input_len": 64, "output_len": 256}
PROMPTS = {"concurrency": 2, "num_requests": 24, "input_len": 768, "output_len": 1}
TURNS = 8
STEP_ANSWERS, STEP_CONTEXT = 4, 400  # of the step that objectives are multiples of
PROMPT_TOKENS = 512


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`whole`: of a worker on all cores, with the hand-over of a pair that shares them; `half`, `by_layers`: of the workers of a pair with

    a half each, by how pages leave. `router`, `client`: their CPU seconds of a request, and of a token. `cores_left`: by others, meanwhile.
    """

    whole: Profile
    half: Profile
    by_layers: Profile
    router: tuple[float, float]
    client: tuple[float, float]
    cores_left: float

    @property
    def alone(self) -> Alone:
        return alone_of(self.half)


class Counted(NamedTuple):
    requests: int
    tokens: int
    cpu_s: float


def alone_of(profile: Profile) -> Alone:
    time = step_time_of(profile)
    prompt_s = time.prefill_step_s + PROMPT_TOKENS * (time.prefill_token_s + PROMPT_TOKENS / 2 * time.prefill_pair_s)
    step_s = time.decode_step_s + STEP_ANSWERS * (time.decode_request_s + STEP_CONTEXT * time.decode_context_s)
    return Alone(prompt_token_s=prompt_s / PROMPT_TOKENS, step_s=step_s)


def step_time_of(profile: Profile) -> Fitted:
    assert profile.step_time is not None, "calibrated"
    return profile.step_time


def chunk_of(profile: Profile, *, itl_s: float, page: int = 16) -> int:
    """Return the prompt tokens that a step with answers may hold to end within `itl_s`: whole pages, one at least."""
    time = step_time_of(profile)
    answers_s = STEP_ANSWERS * (time.decode_request_s + STEP_CONTEXT * time.decode_context_s)
    left_s = itl_s - time.prefill_step_s - answers_s
    token_s = time.prefill_token_s + time.prefill_pair_s * STEP_CONTEXT
    return max(page, min(LONGEST, int(left_s / token_s) // page * page))


def host_costs(one: Counted, other: Counted) -> tuple[float, float]:
    """Solve for CPU seconds of a request, and of a token, that explain two loads; none is negative."""
    det = one.requests * other.tokens - other.requests * one.tokens
    token_s = max(0.0, (one.requests * other.cpu_s - other.requests * one.cpu_s) / det)
    return max(0.0, (one.cpu_s - token_s * one.tokens) / one.requests), token_s


def calibrate(flags: Sequence[str], cores: Sequence[int], tell: Callable[[str], object]) -> Calibration:
    """Measure this machine. `flags`: of every cluster."""
    unified, pair = LAYOUTS[0], next(one for one in LAYOUTS if one.kind == "pairs")
    all_cores, split = pinning(unified, cores), pinning(pair, cores)
    on_all, on_half = ("--num-threads", str(all_cores.threads)), ("--num-threads", str(split.threads))
    with cpu_use() as used:
        tell("a unified worker on all cores")
        with _unified(flags, all_cores) as cluster:
            whole = _profile([_load(cluster, ALONE), _load(cluster, TOGETHER)])
            tell("a pair that shares all cores")
            with pinned([*flags, *on_all], all_cores) as pd:
                whole = msgspec.structs.replace(whole, handover=_handover(cluster, pd))
        half_only = replace(split, by_role={"unified": split.by_role["decode"]})
        with ExitStack() as stack:
            tell("a unified worker on half of them")
            worker = stack.enter_context(_unified(flags, half_only))
            half = _profile([_load(worker, ALONE, seed=1), _load(worker, TOGETHER, seed=1)])
            found = {}
            for way in ("off", "on"):
                tell(f"a pair, {LAYERWISE} {way}")
                with pinned([*flags, LAYERWISE, way, *on_half], split) as pd:
                    found[way] = msgspec.structs.replace(half, handover=_handover(worker, pd))
                    if way == "off":
                        slower, counted = beside(pd), [_counted(pd, load) for load in (PROMPTS, TOGETHER)]
    return Calibration(
        whole=whole,
        half=msgspec.structs.replace(found["off"], beside=slower),
        by_layers=msgspec.structs.replace(found["on"], beside=slower),
        router=host_costs(*(router for router, _ in counted)),
        client=host_costs(*(client for _, client in counted)),
        cores_left=used.cores_left,
    )


def beside(pair: Cluster) -> Beside:
    """Compare answers alone, prompts alone, and both at once, each on its worker."""
    gap_s = _gap_s(_load(pair, ANSWERS, seed=3))
    prompt_s = _median_ttft_s(_load(pair, PROMPTS, seed=4))
    both = load_both(pair.url, ANSWERS, PROMPTS)
    return Beside(
        prefill=max(0.0, _median_ttft_s(both[1]) / prompt_s - 1), decode=max(0.0, _gap_s(both[0]) / gap_s - 1)
    )


def load_both(url: str, one: dict[str, Any], other: dict[str, Any]) -> list[list[RequestRecord]]:
    """Put two loads on one cluster at the same time."""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(load_records, url=url, prompt="ids", seed=5 + i, **load) for i, load in enumerate((one, other))
        ]
        return [future.result()[0].records for future in running]


def _unified(flags: Sequence[str], where: Pinning) -> Any:
    threads = len(where.by_role["unified"])
    return pinned([*flags, "--unified", "--no-enable-mixed-chunk", "--num-threads", str(threads)], where)


def _load(cluster: Cluster, load: dict[str, Any], *, seed: int = 0) -> list[RequestRecord]:
    return load_records(url=cluster.url, prompt="ids", seed=seed, **load)[0].records


def _profile(reports: list[list[RequestRecord]]) -> Profile:
    found = fit(reports)
    return Profile(step_time=found.step_time, outside_s=found.outside_s, source=describe(found))


def _handover(worker: Cluster, pair: Cluster) -> Any:
    load = {**ALONE, "num_requests": 24, "output_len": 2}
    alone, handed = load_records(url=worker.url, compare=pair.url, rounds=TURNS, prompt="ids", seed=2, **load)
    return fit_handover(alone.records, handed.records)


def _counted(cluster: Cluster, load: dict[str, Any]) -> tuple[Counted, Counted]:
    """Return what the router used, and the client."""
    before = cpu_s(cluster)
    records = _load(cluster, load, seed=6)
    after, tokens = cpu_s(cluster), sum(one.output_tokens for one in records)
    router, client = (Counted(len(records), tokens, b - a) for a, b in zip(before, after, strict=True))
    return router, client


def _gap_s(records: Sequence[RequestRecord]) -> float:
    return median(gap for one in records for gap in one.itl_s)


def _median_ttft_s(records: Sequence[RequestRecord]) -> float:
    return median(one.ttft_s for one in records if one.ttft_s is not None)
