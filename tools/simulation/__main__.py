"""`python -m tools.simulation`: one seed, or a soak with fresh ones; and the fixed runs, which tests and planted bugs share."""

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tools.progress import progress
from tools.simulation import report
from tools.simulation.options import SCENARIOS, Options, Scenario, load_scenario, options_of, scenario_paths
from tools.simulation.promises import OF_ENCODERS, PROMISES, play
from tools.simulation.run import Outcome, run

ENCODER_SEEDS = (6011, 6018, 6040)  # of encoder workers
PLANTED_SEEDS = (47, 49, 74, 102, 103, 125, 241, 271, 383, 709)  # they show planted bugs that the others miss
# models remember more than pages of all tokens
GROUP_SEEDS = (1002, 1006, 1009, 1017, 1024, 1050, 1058, 1131, 1141, 1190)
PREFIX_SEEDS = (2012, 2015, 2022, 2044)  # prefill workers get prefixes from each other
RETURN_SEEDS = (3005, 3014, 3015)  # clients come again
IMAGE_SEEDS = (5001, 5037)  # workers send heartbeats, and see images
WHOLE_SEEDS = (7004, 7006, 7007)  # clients send some requests to one worker alone
TURN_SEEDS = (8000, 8014, 8044)  # decode workers send and get prefixes, too
STATE_SEEDS = (9013, 9014)  # recurrent states among them
FIXED_SEEDS = (
    *(*range(1, 41), *PLANTED_SEEDS, *GROUP_SEEDS, *PREFIX_SEEDS, *RETURN_SEEDS, *IMAGE_SEEDS, *ENCODER_SEEDS),
    *(*WHOLE_SEEDS, *TURN_SEEDS, *STATE_SEEDS),
)


def replay_line(options: Options) -> str:
    nodes = options.num_prefill + options.num_decode
    return f"make sim SEED={options.seed} NODES={nodes}"


def tell(outcome: Outcome) -> None:
    print(f"seed {outcome.options.seed}")
    print("\n".join(outcome.options.lines()))
    print(f"faults injected  {outcome.injected or 'none'}")
    print(f"answers          {outcome.outcomes}   seen {outcome.seen}")
    print(
        f"{outcome.num_events} events, {outcome.virtual_s:.1f} s of virtual time in {outcome.real_s:.1f} s;"
        f" at rest {outcome.settled_s:.1f} s after the faults"
    )
    if not outcome.ok:
        print(f"{outcome.details}\nFAILED: {outcome.problem}\nreplay: {replay_line(outcome.options)}")
    print(f"trace hash {outcome.trace_hash}")


def one(args: argparse.Namespace) -> int:
    options = load_scenario(Path(args.scenario)).options if args.scenario else None
    outcome = run(options or options_of(args.seed, nodes=args.nodes))
    tell(outcome)
    if args.save:
        path = SCENARIOS / f"{args.save}.json"
        found = Scenario(found=f"seed {args.seed}", what=outcome.problem, fix="", options=outcome.options)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        print(f"written: {path}; say in it what was wrong and how it was mended")
    return 0 if outcome.ok else 1


def fixed_outcomes() -> Iterator[Outcome]:
    """Run what is promised, the fixed seeds, then the scenarios."""
    yield from map(play, PROMISES)
    yield from map(run, map(options_of, FIXED_SEEDS))
    yield from (run(load_scenario(path).options) for path in scenario_paths())


def encoder_outcomes() -> Iterator[Outcome]:
    """Run those of the fixed runs that have encoder workers."""
    yield from map(play, OF_ENCODERS)
    yield from map(run, map(options_of, ENCODER_SEEDS))


def first_failure(outcomes: Iterable[Outcome]) -> str:
    """Return what is wrong in the first that fails; "": nothing in any."""
    return next((f"seed {found.options.seed}: {found.problem}" for found in outcomes if not found.ok), "")


def soak(args: argparse.Namespace) -> int:
    """Fresh seeds until the time is over; the report afterwards."""
    total = report.Total()
    first = random.SystemRandom().randrange(10**6, 10**9) if args.seed is None else args.seed
    end_s = time.monotonic() + 60 * args.soak
    with progress(round(60 * args.soak), unit="s") as bar:
        seed = first
        while time.monotonic() < end_s:
            outcome = run(options_of(seed, nodes=args.nodes))
            total.add(outcome)
            if not outcome.ok:
                bar.write(f"FAILED: {outcome.problem[:300]}\nreplay: {replay_line(outcome.options)}")
            seed += 1
            done_s = min(bar.total, round(60 * args.soak - (end_s - time.monotonic())))
            bar.set_postfix_str(f"{total.num_seeds} seeds, {len(total.failed)} failed", refresh=False)
            bar.update(done_s - bar.n)
    print(total.text())
    if args.report:
        report.write(total, Path(args.report))
        print(f"written: {args.report}")
    return 1 if total.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="decides everything (soak: the first of the seeds)")
    parser.add_argument("--nodes", type=int, help="prefill and decode workers in all, at least 2; default: drawn")
    parser.add_argument("--scenario", help="play a scenario file instead of a seed")
    parser.add_argument("--save", help="write the run as a scenario file of this name")
    parser.add_argument("--soak", type=float, help="minutes of fresh seeds")
    parser.add_argument("--report", help="soak: write this document")
    args = parser.parse_args()
    if args.nodes is not None and args.nodes < 2:
        parser.error("--nodes: at least 2, a prefill and a decode worker")
    if args.soak is not None:
        return soak(args)
    args.seed = 1 if args.seed is None else args.seed
    return one(args)


if __name__ == "__main__":
    sys.exit(main())
