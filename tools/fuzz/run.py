"""`make fuzz`: fuzzed frames, bootstrap calls, answers and HTTP until enough inputs have been seen; figures to a report.

    python -m tools.fuzz.run --inputs 100000 --schemathesis .venv-fuzz/bin/schemathesis --report docs/reports/fuzz.md
    python -m tools.fuzz.run --parts frames,sockets --inputs 5000        some parts
    python -m tools.fuzz.run ... --resume                                what a run that was cut off has left

Exits 1 for the first crash, hang, leak or answer that is not as described, and shows the smallest input that does it.
"""

import argparse
import contextlib
import faulthandler
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.fuzz.openapi import DOORS, Cases, doors, fuzz_control, fuzz_door
from tools.fuzz.parts import PARTS as INSIDE
from tools.fuzz.parts import fuzz
from tools.fuzz.progress import Progress
from tools.fuzz.report import CUT, DONE, FAILED, Report

CONTROL = "control"
PARTS = (*INSIDE, *DOORS, CONTROL)


def main() -> int:
    _prepare()
    args = _arguments()
    report = Report(args.report, PARTS)
    if not args.resume and args.parts == PARTS:
        report.forget()
    wanted = [part for part in args.parts if not (args.resume and report.is_done(part, _asked(args, part)))]
    for part in wanted:
        if part in INSIDE:
            work = partial(fuzz, INSIDE[part], _share(args, part), args.seed)
            _keep(part, args, report, work)
    outside = [part for part in wanted if part not in INSIDE]
    if outside and args.schemathesis is not None:
        _fuzz_doors(outside, args, report)
    print(report.text())
    return 0


def _fuzz_doors(parts: list[str], args: argparse.Namespace, report: Report) -> None:
    with doors(Cases(args.schemathesis, args.examples, args.seed)) as at:
        for part in parts:
            work = partial(fuzz_control, at) if part == CONTROL else partial(fuzz_door, at, part)
            _keep(part, args, report, work)


def _keep(part: str, args: argparse.Namespace, report: Report, work: Callable[[Progress], str]) -> None:
    """Run a part; whatever becomes of it is in the report."""

    def keep(status: str, result: str) -> None:
        done, seconds = progress.done, progress.elapsed_s
        report.keep(part, status=status, inputs=done, seconds=seconds, result=result, asked=_asked(args, part))

    total = _share(args, part) if part in INSIDE else 0
    progress = Progress(part, total, lambda done: keep(CUT, "was under way"))
    keep(CUT, "was under way")
    with contextlib.closing(progress):
        try:
            keep(DONE, work(progress))
        except BaseException as error:
            failed = isinstance(error, Exception)
            keep(
                FAILED if failed else CUT, f"{type(error).__name__}: see the run's output" if failed else "interrupted"
            )
            raise


def _prepare() -> None:
    """Junk is told of in the logs of the managers; here only their bugs are news."""
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: bool(record.exc_info) or record.levelno >= logging.ERROR)
    logging.basicConfig(handlers=[handler])


def _share(args: argparse.Namespace, part: str) -> int:
    return int(args.inputs * INSIDE[part].share)


def _asked(args: argparse.Namespace, part: str) -> dict[str, int]:
    size = {"inputs": _share(args, part)} if part in INSIDE else {"examples": args.examples}
    return {**size, "seed": args.seed}


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
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has done already")
    parser.add_argument("--inputs", type=int, default=100_000, help="frames, bootstrap calls and answers together")
    parser.add_argument(
        "--examples", type=int, default=60, help="most examples that schemathesis draws for an operation"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", type=Path, help="its command; without it HTTP is left out")
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
