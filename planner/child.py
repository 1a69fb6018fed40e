"""A process that computes runs of one plan. The first line on stdin holds the flags, each further line one run.

usage: python -m planner.child      (planner/pool.py is its only caller)
"""

import sys
from dataclasses import replace

import msgspec

from planner.config import PlanConfig
from planner.layout import parse_layout
from planner.study import study_of, try_rate


class RunOrder(msgspec.Struct):
    layout: str
    rate: float


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlanConfig)
    study = study_of(replace(config, save_profile=None))
    for line in sys.stdin.buffer:
        run = msgspec.json.decode(line, type=RunOrder)
        point = try_rate(study, parse_layout(run.layout), run.rate)
        sys.stdout.buffer.write(msgspec.json.encode(point) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
