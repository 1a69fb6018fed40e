"""`make fuzz`: fuzzed frames, bootstrap calls, answers and HTTP until enough inputs have been seen; figures to a report.

    python -m tools.fuzz.run --inputs 100000 --schemathesis .venv-fuzz/bin/schemathesis --report docs/reports/fuzz.md
    python -m tools.fuzz.run --parts frames,sockets --inputs 5000        some parts

Exits 1 for the first crash, hang, leak or answer that is not as described, and shows the smallest input that does it.
"""

import argparse
import faulthandler
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tools.fuzz.footprint import note_life
from tools.fuzz.openapi import DOORS, Cases, doors, fuzz_control, fuzz_door
from tools.fuzz.parts import PARTS as INSIDE
from tools.fuzz.parts import fuzz
from tools.fuzz.report import CUT, DONE, FAILED, Report
from tools.progress import progress

CONTROL = "control"
PARTS = (*INSIDE, *DOORS, CONTROL)


def main() -> int:
    _prepare()
    args = _arguments()
    report = Report(args.report, PARTS, anew=args.parts == PARTS)
    for part in args.parts:
        if part in INSIDE:
            _keep(part, args, report, partial(fuzz, INSIDE[part], _share(args, part), args.seed))
    outside = [part for part in args.parts if part not in INSIDE]
    if outside and args.schemathesis is not None:
        with doors(Cases(args.schemathesis, args.seed)) as at:
            for part in outside:
                _keep(
                    part, args, report, partial(fuzz_control, at) if part == CONTROL else partial(fuzz_door, at, part)
                )
    print(report.text())
    return 0


def _keep(part: str, args: argparse.Namespace, report: Report, work: Callable[["tqdm[Any]"], str]) -> None:
    """Run a part; whatever becomes of it is in the report."""
    status, result = CUT, "was under way"
    report.keep(part, status=status, inputs=0, seconds=0.0, result=result)
    note_life()
    with progress(_share(args, part) if part in INSIDE else None, unit="input", what=part) as bar:
        try:
            status, result = DONE, work(bar)
        except Exception as error:
            status, result = FAILED, f"{type(error).__name__}: see the run's output"
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            report.keep(part, status=status, inputs=bar.n, seconds=bar.format_dict["elapsed"], result=result)


def _prepare() -> None:
    """Junk is told of in the logs of the managers; here only their bugs are news."""
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: bool(record.exc_info) or record.levelno >= logging.ERROR)
    logging.basicConfig(handlers=[handler])


def _share(args: argparse.Namespace, part: str) -> int:
    return int(args.inputs * INSIDE[part].share)


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="fuzz the control plane, the bootstrap server, the readers of answers and every HTTP door"
    )
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)}; without it all, from the start"
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="frames, bootstrap calls and answers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", type=Path, help="its command; without it HTTP is left out")
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
