"""Step times from reports of `tandem bench`: pure, from records of requests to a `Fitted` cost model.

What a request saw says how long steps took, where no other request disturbed it:

    prefill   a request that was alone until its first token:  TTFT = outside + step + a x prompt + b x prompt^2 / 2
    decode    a gap between two tokens while nobody waited for a first one:  step + c x requests + d x KV tokens

Both are linear, so least squares find them; errors count relative to the time, a negative coefficient becomes 0 (its
column leaves). `outside` and `step` cannot be told apart by TTFT alone: a prefill step costs at least what a decode step
does besides its requests, the rest of the constant is taken to be outside of the engine.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from deploy.bench.stats import Record
from deploy.plan.step_time import Fitted
from engine.config import ConfigError

LEAST_PREFILLS, LEAST_GAPS, MOST_GAPS = 8, 64, 4000


class ReportTarget(msgspec.Struct):
    """Of a bench report: what the server's requests saw."""

    records: list[Record]


class Report(msgspec.Struct):
    """The part of a bench report that is used here."""

    targets: list[ReportTarget]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One gap between two tokens: how long, of how many requests at once, which read how many KV tokens together."""

    seconds: float
    requests: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`outside_s`: of a TTFT, what is no step. Errors: median of |predicted - measured| / measured."""

    step_time: Fitted
    outside_s: float
    prefill_error: float
    decode_error: float
    num_prefills: int
    num_gaps: int


def read_records(path: str) -> list[Record]:
    """The records of the first target of a report; raises `ConfigError` naming the flag and the file."""
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"--fit {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--fit {path}: is no report of `tandem bench --output`: {error}") from None
    if not report.targets:
        raise ConfigError(f"--fit {path}: is no report of `tandem bench --output`: it has no target")
    return [record for record in report.targets[0].records if record.error is None and record.ttft_s is not None]


def fit(reports: Sequence[Sequence[Record]]) -> Fit:
    """`reports`: the records of each run. Raises `ConfigError` when they say too little."""
    alone = [(r.prompt_tokens - r.cached_tokens, _ttft(r)) for records in reports for r in _alone(records)]
    gaps = [gap for records in reports for gap in quiet_gaps(records)]
    if len(alone) < LEAST_PREFILLS or len({tokens for tokens, _ in alone}) < 3:
        raise ConfigError(
            f"--fit: {len(alone)} requests were alone until their first token, {LEAST_PREFILLS} of three lengths or more "
            "are needed; add a report of `tandem bench --concurrency 1 --random-range-ratio 0.1`"
        )
    if len(gaps) < LEAST_GAPS:
        raise ConfigError(
            f"--fit: {len(gaps)} gaps between tokens were undisturbed, {LEAST_GAPS} are needed; "
            "add a report of `tandem bench --concurrency 8 --output-len 128`"
        )
    constant, per_token, per_pair = _least_squares(
        [[1.0, tokens, tokens * (tokens + 1) / 2] for tokens, _ in alone], [seconds for _, seconds in alone]
    )
    step, per_request, per_context = _least_squares(
        [[1.0, gap.requests, gap.context] for gap in gaps], [gap.seconds for gap in gaps]
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
        abs(step + per_request * g.requests + per_context * g.context - g.seconds) / g.seconds for g in gaps
    ]
    return Fit(
        step_time=model,
        outside_s=constant - prefill_step,
        prefill_error=median(prefill_errors),
        decode_error=median(decode_errors),
        num_prefills=len(alone),
        num_gaps=len(gaps),
    )


def quiet_gaps(records: Sequence[Record]) -> list[Gap]:
    """Gaps in which no request was between its sending and its first token; of very many, some, evenly taken."""
    begins = sorted(r.sent_s for r in records)
    firsts = sorted(r.sent_s + _ttft(r) for r in records)
    tokens = [_token_times(r) for r in records]
    quiet = []
    for times in tokens:
        for begin_s, end_s in pairwise(times):
            waiting = bisect_right(begins, end_s) - bisect_right(
                firsts, begin_s
            )  # sent by its end, silent at its begin
            if waiting == 0 and end_s > begin_s:
                quiet.append((begin_s, end_s))
    return [_gap(records, tokens, *times) for times in quiet[:: 1 + len(quiet) // MOST_GAPS]]


# ---- inside


def _ttft(record: Record) -> float:
    assert record.ttft_s is not None
    return record.ttft_s


def _token_times(record: Record) -> list[float]:
    times = [record.sent_s + _ttft(record)]
    for gap in record.itl_s:
        times.append(times[-1] + gap)
    return times


def _alone(records: Sequence[Record]) -> list[Record]:
    """Those during whose wait for the first token nobody else was there."""
    begins = sorted(r.sent_s for r in records)
    ends = sorted(r.sent_s + r.e2e_s for r in records)
    there = [bisect_left(begins, r.sent_s + _ttft(r)) - bisect_right(ends, r.sent_s) for r in records]
    return [record for record, num in zip(records, there, strict=True) if num == 1]


def _gap(records: Sequence[Record], tokens: Sequence[Sequence[float]], begin_s: float, end_s: float) -> Gap:
    requests = context = 0
    for record, times in zip(records, tokens, strict=True):
        if times[0] <= begin_s < times[-1]:
            requests += 1
            context += record.prompt_tokens + bisect_right(times, begin_s)
    return Gap(seconds=end_s - begin_s, requests=requests, context=context)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Coefficients of three columns, none negative, by least squares of relative errors."""
    target = np.asarray(seconds, np.float64)
    matrix = np.asarray(rows, np.float64) / target[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    keep = [0, 1, 2]
    while keep:
        found = np.linalg.lstsq(matrix[:, keep] / scale[keep], np.ones(len(target)), rcond=None)[0]
        if (found >= 0).all():
            break
        keep.remove(keep[int(found.argmin())])
    values = [0.0, 0.0, 0.0]
    for column, value in zip(keep, found if keep else (), strict=True):
        values[column] = float(value / scale[column])
    return values[0], values[1], values[2]
