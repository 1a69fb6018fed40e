"""Measures what one request takes on each kind of worker: a unified one on all cores, and one on the half of them that a pair gives it.

A shared machine is fast at one moment and slow at another (a core's other hyperthread may be someone else's). So both workers are up
at once and every load comes in turns: what is compared has seen the same moments.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from benchmarks.cluster import load_records
from benchmarks.cpu_use import cpu_use
from benchmarks.goodput.clusters import pinned
from benchmarks.goodput.layouts import LAYOUTS, pinning
from benchmarks.goodput.loads import CALIBRATING, LONGEST, Alone
from deploy.bench.stats import RequestRecord
from planner.fit import Profile, fit
from planner.step_time import Fitted

TURNS = 4
STEP_ANSWERS, STEP_CONTEXT = 4, 400  # of the step that objectives are multiples of
PROMPT_TOKENS, PAGE = 512, 16


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`whole`, `half`: of a worker on all cores, and on half of them. `cores_left`: by others, meanwhile."""

    whole: Profile
    half: Profile
    cores_left: float

    @property
    def alone(self) -> Alone:
        return alone_of(self.half)


def alone_of(profile: Profile) -> Alone:
    time = step_time_of(profile)
    prompt_s = time.prefill_step_s + PROMPT_TOKENS * (time.prefill_token_s + PROMPT_TOKENS / 2 * time.prefill_pair_s)
    step_s = time.decode_step_s + STEP_ANSWERS * (time.decode_request_s + STEP_CONTEXT * time.decode_context_s)
    return Alone(prompt_token_s=prompt_s / PROMPT_TOKENS, step_s=step_s)


def step_time_of(profile: Profile) -> Fitted:
    assert profile.step_time is not None, "calibrated"
    return profile.step_time


def chunk_of(profile: Profile, *, itl_s: float) -> int:
    """Return the prompt tokens that a step with answers may hold to end within `itl_s`: whole pages, one at least."""
    time = step_time_of(profile)
    answers_s = STEP_ANSWERS * (time.decode_request_s + STEP_CONTEXT * time.decode_context_s)
    left_s = itl_s - time.prefill_step_s - answers_s
    token_s = time.prefill_token_s + time.prefill_pair_s * STEP_CONTEXT
    return max(PAGE, min(LONGEST, int(left_s / token_s) // PAGE * PAGE))


def calibrate(flags: Sequence[str], cores: Sequence[int], tell: Callable[[str], object]) -> Calibration:
    """Measure this machine. `flags`: of every cluster."""
    pair = next(one for one in LAYOUTS if one.kind == "pairs")
    all_cores, split = pinning(LAYOUTS[0], cores), pinning(pair, cores)
    half_only = replace(split, by_role={"unified": split.by_role["decode"]})
    found: dict[str, list[list[RequestRecord]]] = {"whole": [], "half": []}
    left = []
    with ExitStack() as stack:
        urls = {}
        for name, where in (("whole", all_cores), ("half", half_only)):
            tell(f"starting a unified worker on {where.threads} cores")
            own = ("--unified", "--no-enable-mixed-chunk", "--num-threads", str(where.threads))
            urls[name] = stack.enter_context(pinned([*flags, *own], where)).url
        for turn in range(TURNS):
            tell(f"turn {turn + 1} of {TURNS}")
            with cpu_use() as used:
                for name, url in urls.items():
                    for i, load in enumerate(CALIBRATING):
                        (one,) = load_records(url=url, prompt="ids", seed=2 * turn + i, **load)
                        found[name].append(one.records)
            left.append(used.cores_left)
    profiles = {name: _profile(records) for name, records in found.items()}
    return Calibration(**profiles, cores_left=min(left))


def _profile(reports: list[list[RequestRecord]]) -> Profile:
    found = fit(reports)
    return Profile(step_time=found.step_time, outside_s=found.outside_s)
