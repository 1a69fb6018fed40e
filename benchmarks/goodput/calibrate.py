"""What a planner must know of this machine, measured as docs/planning.md says: loads on unified workers, and pairs beside them.

Each kind of worker is measured on its own cores: one with the cores of half a pair, one with all. Two more figures belong to a machine
that all share: the CPU time of router and client, and how much longer steps take while the other cores compute.

A shared machine is fast at one moment and slow at another (a core's other hyperthread may be someone else's). So all clusters are up at
once and every load comes in turns: what is compared has seen the same moments. Steps are means over them, since throughput is; a
hand-over is far shorter than what moments differ by, so it is between the fastest of the turns.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import msgspec

from benchmarks.cluster import Cluster, load_records
from benchmarks.cpu_use import cpu_use
from benchmarks.goodput.layouts import LAYERWISE, LAYOUTS, Pinning, pinning
from benchmarks.goodput.loads import LONGEST, Alone
from benchmarks.goodput.measure import cpu_s, pinned
from deploy.bench.stats import RequestRecord
from planner.fit import HandoverTime, fit, handover_of
from planner.profile import Profile, describe
from planner.step_time import Beside, Fitted

TURNS = 4
ALONE = {"concurrency": 1, "num_requests": 8, "input_len": 1024, "random_range_ratio": 0.06, "output_len": 12}
TOGETHER = {"concurrency": 6, "num_requests": 12, "input_len": 320, "random_range_ratio": 0.2, "output_len": 48}
HANDED = {"concurrency": 1, "num_requests": 8, "input_len": 1024, "random_range_ratio": 0.06, "output_len": 2}
ANSWERS = {"concurrency": 4, "num_requests": 4, "input_len": 64, "output_len": 128}
PROMPTS = {"concurrency": 2, "num_requests": 12, "input_len": 768, "output_len": 1}
SEEDS = 16  # of a turn's loads, each its own: no prompt is found in a cache
FLUSH_S = 10.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """All that are calibrated. `whole`, `half`: unified workers, on all cores and on half of them; the others: pairs."""

    whole: Cluster
    half: Cluster
    shared: Cluster
    pair: Cluster
    by_layers: Cluster


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the turns have measured. `handed`: by pair, of each turn the TTFT of each prompt on a unified worker and through the pair;

    `gaps_s`, `prompts_s`: means of answers and of prompts, alone and beside the other. `counted`: of the router and of the client, by load.
    """

    whole: list[list[RequestRecord]] = field(default_factory=list)
    half: list[list[RequestRecord]] = field(default_factory=list)
    handed: dict[str, list[list[list[RequestRecord]]]] = field(default_factory=lambda: defaultdict(list))
    gaps_s: list[tuple[float, float]] = field(default_factory=list)
    prompts_s: list[tuple[float, float]] = field(default_factory=list)
    counted: list[list[tuple["Counted", "Counted"]]] = field(default_factory=list)
    cores_left: list[float] = field(default_factory=list)


def calibrate(flags: Sequence[str], cores: Sequence[int], tell: Callable[[str], object]) -> Calibration:
    """Measure this machine. `flags`: of every cluster."""
    seen = Seen()
    with ExitStack() as stack:
        clusters = _start(flags, cores, stack, tell)
        for number in range(TURNS):
            tell(f"turn {number + 1} of {TURNS}")
            with cpu_use() as used:
                _turn(clusters, seen, number)
            seen.cores_left.append(used.cores_left)
    return calibration_of(seen)


def calibration_of(seen: Seen) -> Calibration:
    whole, half = _profile(seen.whole), _profile(seen.half)
    slower = Beside(prefill=_more(seen.prompts_s), decode=_more(seen.gaps_s))
    found = {name: fastest_handover(turns) for name, turns in seen.handed.items()}
    router, client = (
        host_costs(*(_sum([turn[load][part] for turn in seen.counted]) for load in range(2))) for part in range(2)
    )
    return Calibration(
        whole=msgspec.structs.replace(whole, handover=found["shared"]),
        half=msgspec.structs.replace(half, handover=found["pair"], beside=slower),
        by_layers=msgspec.structs.replace(half, handover=found["by_layers"], beside=slower),
        router=router,
        client=client,
        cores_left=min(seen.cores_left),
    )


def fastest_handover(turns: Sequence[Sequence[Sequence[RequestRecord]]]) -> HandoverTime:
    """Fit a hand-over to the fastest of the turns: of each, records of the same prompts without one, and with one."""
    tokens = {record.idx: record.prompt_tokens for record in turns[0][0]}
    alone, handed = (
        {idx: min(one.ttft_s or 0.0 for turn in turns for one in turn[which] if one.idx == idx) for idx in tokens}
        for which in range(2)
    )
    return handover_of([(tokens[idx], handed[idx] - alone[idx]) for idx in tokens])


def _start(flags: Sequence[str], cores: Sequence[int], stack: ExitStack, tell: Callable[[str], object]) -> Clusters:
    unified, pair = LAYOUTS[0], next(one for one in LAYOUTS if one.kind == "pairs")
    all_cores, split = pinning(unified, cores), pinning(pair, cores)
    half_only = replace(split, by_role={"unified": split.by_role["decode"]})
    on_all, on_half = ("--num-threads", str(all_cores.threads)), ("--num-threads", str(split.threads))

    def start(name: str, where: Pinning, *more: str) -> Cluster:
        tell(f"starting {name}")
        return stack.enter_context(pinned([*flags, *more], where))

    only = ("--unified", "--no-enable-mixed-chunk")
    return Clusters(
        whole=start("a unified worker on all cores", all_cores, *only, *on_all),
        half=start("a unified worker on half of them", half_only, *only, *on_half),
        shared=start("a pair that shares all cores", all_cores, *on_all),
        pair=start("a pair", split, LAYERWISE, "off", *on_half),
        by_layers=start("a pair, by layers", split, LAYERWISE, "on", *on_half),
    )


def _turn(clusters: Clusters, seen: Seen, number: int) -> None:
    first = SEEDS * number
    for cluster, found in ((clusters.whole, seen.whole), (clusters.half, seen.half)):
        found += [_load(cluster, load, seed=first + i) for i, load in enumerate((ALONE, TOGETHER))]
    for name, worker in (("shared", clusters.whole), ("pair", clusters.half), ("by_layers", clusters.half)):
        handed: Cluster = getattr(clusters, name)
        seen.handed[name].append([_load(one, HANDED, seed=2) for one in (worker, handed)])
        for one in (worker, handed):
            _flush(one)  # the prompts of all turns are the same
    pair = clusters.pair
    answers, prompts = _load(pair, ANSWERS, seed=first + 3), _load(pair, PROMPTS, seed=first + 4)
    both = load_both(pair.url, ANSWERS, PROMPTS, seed=first + 5)
    seen.gaps_s.append((_gap_s(answers), _gap_s(both[0])))
    seen.prompts_s.append((_ttft_s(prompts), _ttft_s(both[1])))
    seen.counted.append([_counted(pair, load, seed=first + 7 + i) for i, load in enumerate((PROMPTS, TOGETHER))])


def load_both(url: str, one: dict[str, Any], other: dict[str, Any], *, seed: int) -> list[list[RequestRecord]]:
    """Put two loads on one cluster at the same time."""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(load_records, url=url, prompt="ids", seed=seed + i, **load)
            for i, load in enumerate((one, other))
        ]
        return [future.result()[0].records for future in running]


def _load(cluster: Cluster, load: dict[str, Any], *, seed: int) -> list[RequestRecord]:
    return load_records(url=cluster.url, prompt="ids", seed=seed, **load)[0].records


def _flush(cluster: Cluster) -> None:
    with urlopen(Request(f"{cluster.url}/flush_cache", method="POST"), timeout=FLUSH_S):
        pass


def _profile(reports: list[list[RequestRecord]]) -> Profile:
    found = fit(reports)
    return Profile(step_time=found.step_time, outside_s=found.outside_s, source=describe(found))


def _counted(cluster: Cluster, load: dict[str, Any], *, seed: int) -> tuple[Counted, Counted]:
    """Return what the router used, and the client."""
    before = cpu_s(cluster)
    records = _load(cluster, load, seed=seed)
    after, tokens = cpu_s(cluster), sum(one.output_tokens for one in records)
    router, client = (Counted(len(records), tokens, b - a) for a, b in zip(before, after, strict=True))
    return router, client


def _sum(counted: Sequence[Counted]) -> Counted:
    requests, tokens, used_s = (sum(values) for values in zip(*counted, strict=True))
    return Counted(int(requests), int(tokens), used_s)


def _more(turns: Sequence[tuple[float, float]]) -> float:
    """By how much the second figures are more than the first, as a part of these; 0 at least."""
    one, other = (mean(values) for values in zip(*turns, strict=True))
    return max(0.0, other / one - 1)


def _gap_s(records: Sequence[RequestRecord]) -> float:
    return mean(gap for one in records for gap in one.itl_s)


def _ttft_s(records: Sequence[RequestRecord]) -> float:
    return mean(one.ttft_s for one in records if one.ttft_s is not None)
