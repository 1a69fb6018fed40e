"""A process that computes runs of one plan. The first line on stdin holds the flags, each further line one run.

usage: python -m planner.child      (planner/pool.py is its only caller)
"""

import sys
from dataclasses import replace

import msgspec

from planner.config import PlanConfig
from planner.layout import parse_layout
from planner.study import study_of, try_rate


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlanConfig)
    study = study_of(replace(config, save_profile=None))
    for line in sys.stdin.buffer:
        layout, rate = msgspec.json.decode(line, type=tuple[str, float])
        point = try_rate(study, parse_layout(layout), rate)
        sys.stdout.buffer.write(msgspec.json.encode(point) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
