"""More steps than a test run has time for, from fresh seeds: `make soak-core STEPS=1000000`.

Rounds of stories, each from a seed of its own. A failure is shrunk, printed with the line that replays its round, and
ends the run with status 1; what was driven goes to --report.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.core.proof.driver import play
from tests.core.proof.story import (
    rushes,
    stories,
    stories_with_a_drafter,
    stories_with_adapters,
    stories_with_drafts,
    stories_with_groups,
    stories_with_images,
    stories_with_states_and_drafts,
)
from tests.disagg.moving_stories import moving_stories
from tests.disagg.moving_stories import play as play_moves
from tests.disagg.two_role_stories import play as play_two_roles
from tests.disagg.two_role_stories import two_role_stories
from tests.loop.test_dp_attention import fuzz
from tools.progress import progress

STORIES_A_ROUND = 100  # of each kind
AGREED_STEPS_A_ROUND = 300  # of ranks of DP attention
GROUPS: tuple[dict[str, bool], ...] = ({"states": True}, {"windows": True}, {"states": True, "windows": True})

T = TypeVar("T")


def drive_round(number: int, *, shrink: bool = True) -> Counter[str]:
    """The stories of seed `number`, of one engine, of two roles and of ranks; raises what a wrong one raises."""
    plain = (stories, rushes, stories_with_images, stories_with_drafts, stories_with_a_drafter)
    of_engines = [kind() for kind in (*plain, stories_with_states_and_drafts)]
    of_engines += [stories_with_groups(**groups) for groups in GROUPS]
    of_engines += [stories_with_adapters(**groups) for groups in ({}, *GROUPS)]
    seen: Counter[str] = Counter()
    for drawn in of_engines:
        seen += _drive(number, drawn, lambda story: play(story).tally(), shrink=shrink)
    for groups, adapters in product(({}, *GROUPS), (False, True)):
        seen += _drive(number, two_role_stories(**groups, adapters=adapters), play_two_roles, shrink=shrink)
    seen += _drive(number, moving_stories(), play_moves, shrink=shrink)
    seen["agreed_steps"] += fuzz(number, steps=AGREED_STEPS_A_ROUND)
    return seen


def _drive(number: int, drawn: SearchStrategy[T], tell: Callable[[T], Counter[str]], *, shrink: bool) -> Counter[str]:
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=STORIES_A_ROUND,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(story=drawn)
    def drive(story: T) -> None:
        seen.update(tell(story))

    drive()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak_core", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="of the first round; fresh without it")
    parser.add_argument("--report", type=Path, default=None)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # the roles say which transfer failed
    first = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    seen: Counter[str] = Counter()
    started_s, number = time.monotonic(), first
    with progress(args.steps, unit="step", what=f"seeds from {first}") as bar:
        while seen["steps"] < args.steps:
            try:
                now = drive_round(number)
            except BaseException:
                print(f"\nreplay: make soak-core STEPS=1 SEED={number}", file=sys.stderr)
                raise
            seen.update(now)
            bar.update(now["steps"])
            number += 1
    report = {
        "seeds": [first, number - 1],
        "seconds": round(time.monotonic() - started_s, 1),
        **dict(sorted(seen.items())),
    }
    print(json.dumps(report, indent=2))
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
