"""Fits step times to reports of `tandem bench`. Pure.

Undisturbed requests reveal durations:

    prefill   a single request until its first token:
              TTFT = outside + step + a x prompt + b x prompt^2 / 2
    decode    ITL while no request waits for its first token:
              step + c x requests + d x KV tokens
    hand-over additional TTFT of the same prompt through a pair:  e + f x prompt

Non-negative least squares of relative errors over stretches, as tokens arrive in clumps. A prefill
step costs at least a decode step's constant, the rest is `outside`. The noisy hand-over's slope is
the median of all (Theil and Sen, JASA 1968).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np

from deploy.bench.stats import RequestRecord
from planner.step_time import Beside, Fitted, Gpu
from service.flags import ConfigError

MIN_PREFILLS, MIN_GAPS, MAX_STRETCHES = 8, 64, 4000
STRETCH = 16  # gaps
ROUNDS = 5  # of reweighted least squares
NO_REPORT = "is no report of `tandem bench --output`"
Decoded = TypeVar("Decoded")


class ReportTarget(msgspec.Struct):
    records: list[RequestRecord]


class Report(msgspec.Struct):
    targets: list[ReportTarget]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive gaps of a request, with means of duration, requests and KV tokens."""

    gaps: int
    seconds: float
    requests: float
    context: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverTime:
    """Seconds per request, and per prompt token."""

    request_s: float
    token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeFit:
    """Errors: median |predicted - measured| / measured."""

    step_time: Fitted
    outside_s: float
    prefill_error: float
    decode_error: float
    num_prefills: int
    num_gaps: int


def read_records(path: str) -> list[RequestRecord]:
    """The first target. Raises ConfigError."""
    return _read(path, flag="--fit", targets=1)[0]


def fit(reports: Sequence[Sequence[RequestRecord]]) -> StepTimeFit:
    """ConfigError for too few records."""
    alone = [(r.prompt_tokens - r.cached_tokens, _ttft(r)) for records in reports for r in _alone(records)]
    stretches = [stretch for records in reports for stretch in quiet_stretches(records)]
    num_gaps = sum(stretch.gaps for stretch in stretches)
    if len(alone) < MIN_PREFILLS or len({tokens for tokens, _ in alone}) < 3:
        raise ConfigError(
            f"--fit: {len(alone)} requests were alone until their first token, {MIN_PREFILLS} of three lengths or more "
            "are needed; add a report of `tandem bench --concurrency 1 --random-range-ratio 0.1`"
        )
    if num_gaps < MIN_GAPS:
        raise ConfigError(
            f"--fit: {num_gaps} gaps between tokens were undisturbed, {MIN_GAPS} are needed; "
            "add a report of `tandem bench --concurrency 8 --output-len 128`"
        )
    constant, per_token, per_pair = least_squares(
        [[1.0, tokens, tokens * (tokens + 1) / 2] for tokens, _ in alone], [seconds for _, seconds in alone]
    )
    step, per_request, per_context = least_squares(
        [[1.0, s.requests, s.context] for s in stretches], [s.seconds for s in stretches]
    )
    prefill_step = min(constant, step)
    model = Fitted(
        prefill_step_s=prefill_step,
        prefill_token_s=per_token,
        prefill_pair_s=per_pair,
        decode_step_s=step,
        decode_request_s=per_request,
        decode_context_s=per_context,
    )
    prefill_errors = [abs(constant + per_token * n + per_pair * n * (n + 1) / 2 - s) / s for n, s in alone]
    decode_errors = [
        abs(step + per_request * s.requests + per_context * s.context - s.seconds) / s.seconds
        for s in stretches
        if s.seconds > 0
    ]
    return StepTimeFit(
        step_time=model,
        outside_s=constant - prefill_step,
        prefill_error=median(prefill_errors),
        decode_error=median(decode_errors),
        num_prefills=len(alone),
        num_gaps=num_gaps,
    )


def fit_handover(unified: Sequence[RequestRecord], pair: Sequence[RequestRecord]) -> HandoverTime:
    """Fit the hand-over to equal single requests, unified and through a pair, in turns.

    Prompts must fit into one chunk. Raises ConfigError.
    """
    before = {record.idx: _ttft(record) for record in _alone(unified)}
    more = [(r.prompt_tokens, _ttft(r) - before[r.idx]) for r in _alone(pair) if r.idx in before]
    if len(more) < MIN_PREFILLS or len({tokens for tokens, _ in more}) < 3:
        raise ConfigError(
            f"--fit-pair: {len(more)} requests were alone until their first token on both, {MIN_PREFILLS} of three lengths or "
            "more are needed; make it with `tandem bench --url UNIFIED --compare ROUTER --concurrency 1 --rounds 40 "
            "--random-range-ratio 0.1`"
        )
    return handover_of(more)


def handover_of(more: Sequence[tuple[int, float]]) -> HandoverTime:
    token_s = max(0.0, median((b - a) / (n - m) for (m, a), (n, b) in combinations(more, 2) if m != n))
    return HandoverTime(request_s=max(0.0, median(s - token_s * tokens for tokens, s in more)), token_s=token_s)


def quiet_stretches(records: Sequence[RequestRecord]) -> list[Stretch]:
    begins = sorted(r.sent_s for r in records)
    firsts = sorted(r.sent_s + _ttft(r) for r in records)
    tokens = [list(accumulate(r.itl_s, initial=r.sent_s + _ttft(r))) for r in records]  # times

    def is_quiet(begin_s: float, end_s: float) -> bool:
        return bisect_right(begins, end_s) == bisect_right(firsts, begin_s)

    found = [stretch for times in tokens for stretch in _stretches(times, is_quiet)]
    return [_measured(records, tokens, times) for times in found[:: 1 + len(found) // MAX_STRETCHES]]


# ---- inside


def _read(path: str, *, flag: str, targets: int) -> list[list[RequestRecord]]:
    report = _decoded(path, Report, flag=flag, wrong=NO_REPORT)
    if len(report.targets) < targets:
        lacks = "it has no target" if targets == 1 else "it has no second target (--compare)"
        raise ConfigError(f"{flag} {path}: {NO_REPORT}: {lacks}")
    answered = [[r for r in one.records if r.error is None and r.ttft_s is not None] for one in report.targets]
    return answered[:targets]


def _decoded(path: str, kind: type[Decoded], *, flag: str, wrong: str) -> Decoded:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{flag} {path}: {wrong}: {error}") from None


def _ttft(record: RequestRecord) -> float:
    assert record.ttft_s is not None
    return record.ttft_s


def _alone(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    begins = sorted(r.sent_s for r in records)
    ends = sorted(r.sent_s + r.e2e_s for r in records)
    there = [bisect_left(begins, r.sent_s + _ttft(r)) - bisect_right(ends, r.sent_s) for r in records]
    return [record for record, num in zip(records, there, strict=True) if num == 1]


def _stretches(times: Sequence[float], is_quiet: Callable[[float, float], bool]) -> Iterator[Sequence[float]]:
    """Yield token times with quiet gaps, `STRETCH` at most."""
    begin = 0
    for end in range(1, len(times)):
        if not is_quiet(times[end - 1], times[end]):
            if end - 1 > begin:
                yield times[begin:end]
            begin = end
        elif end - begin == STRETCH:
            yield times[begin : end + 1]
            begin = end
    if len(times) - 1 > begin:
        yield times[begin:]


def _measured(records: Sequence[RequestRecord], tokens: Sequence[Sequence[float]], times: Sequence[float]) -> Stretch:
    requests = context = 0
    for record, theirs in zip(records, tokens, strict=True):
        for begin_s in times[:-1]:
            if theirs[0] <= begin_s < theirs[-1]:
                requests += 1
                context += record.prompt_tokens + bisect_right(theirs, begin_s)
    gaps = len(times) - 1
    return Stretch(gaps=gaps, seconds=(times[-1] - times[0]) / gaps, requests=requests / gaps, context=context / gaps)


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Non-negative, by relative errors."""
    target = np.asarray(seconds, np.float64)
    matrix = np.asarray(rows, np.float64)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        values = _without_negatives(matrix / scale / weights[:, None], target / weights)
        weights = np.maximum(matrix / scale @ values, 0.01 * np.median(target))
    first, second, third = (float(value) for value in values / scale)
    return first, second, third


def _without_negatives(matrix: Any, target: Any) -> Any:
    """Drop the most negative column until none is."""
    values, keep = np.zeros(3), [0, 1, 2]
    while keep:
        found = np.linalg.lstsq(matrix[:, keep], target, rcond=None)[0]
        if (found >= 0).all():
            values[keep] = found
            break
        keep.remove(keep[int(found.argmin())])
    return values


# ---- Files of measured profiles.


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured step times, the GPU, or both (docs/planning.md)."""

    step_time: Fitted | None = None
    outside_s: float | None = None
    source: str = ""
    handover: HandoverTime | None = None
    tp_size: int = 1
    gpu: Gpu | None = None
    compute_efficiency: float | None = None
    memory_efficiency: float | None = None
    step_overhead_ms: float | None = None
    all_reduce_us: float | None = None
    accept_rate: float | None = None
    match_rate: float | None = None
    beside: Beside = Beside()


def fit_profile(reports: Sequence[str], *, pair: str | None, tp_size: int) -> Profile:
    """Raises ConfigError."""
    found = fit([read_records(path) for path in reports])
    handover = fit_handover(*_read(pair, flag="--fit-pair", targets=2)) if pair else None
    return Profile(
        step_time=found.step_time,
        outside_s=found.outside_s,
        source=describe(found, handover),
        handover=handover,
        tp_size=tp_size,
    )


def save_profile(profile: Profile, path: str) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def describe(found: StepTimeFit, handover: HandoverTime | None = None) -> str:
    pair = ""
    if handover is not None:
        pair = f"; hand-over {1000 * handover.request_s:.1f} ms and {1e6 * handover.token_s:.1f} us a token"
    return (
        f"measured: {found.num_prefills} prefills (median error {100 * found.prefill_error:.1f} %), "
        f"{found.num_gaps} decode steps ({100 * found.decode_error:.1f} %){pair}"
    )


def read_profile(path: str) -> Profile:
    found = _decoded(path, Profile, flag="--gpu-profile", wrong="is no profile (--save-profile writes one)")
    if found.step_time is None and found.gpu is None:
        raise ConfigError(f"--gpu-profile {path}: has neither `step_time` nor `gpu`")
    if min(found.beside.prefill, found.beside.decode) < 0:
        raise ConfigError(f"--gpu-profile {path}: beside: a step takes no less time while others run; give 0 or more")
    for name, rate in (("accept_rate", found.accept_rate), ("match_rate", found.match_rate)):
        if rate is not None and not (0 < rate < 1 or (rate == 1 and name == "match_rate")):
            raise ConfigError(f"--gpu-profile {path}: {name} must be between 0 and 1, got {rate}")
    return found
