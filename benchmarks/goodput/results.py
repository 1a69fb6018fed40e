"""What was measured so far, as a JSON file: written after each run, and read again by one that goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from planner.goodput import Point, Search, SloTargets
from service.flags import ConfigError

NEAR, STRIDE, MOST_STEPS = 1.08, 1.3, 8  # of a search
LOWEST = 0.15  # of the guess: below it a run takes many minutes


@dataclass(slots=True, kw_only=True)
class Cell:
    """A layout under a load. `guess`: the first rate that is tried, in requests a second.

    `runs`: of each measured point, what else is known. `done`: the search has ended.
    """

    load: str
    layout: str
    guess: float
    points: list[Point] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def search(self, slo: SloTargets) -> Search:
        """The search as it stands."""
        return Search(
            guess=self.guess,
            share=slo.share,
            near=NEAR,
            stride=STRIDE,
            most_steps=MOST_STEPS,
            lowest=LOWEST,
            points=self.points,
        )


@dataclass(slots=True, kw_only=True)
class Results:
    """`arguments`: what makes two measurements comparable. `loads`: by name, objectives and mean lengths. `remarks`: by hand, for the page."""

    environment: Mapping[str, Any]
    arguments: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None
    loads: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def cell(self, load: str, layout: str) -> Cell | None:
        return next((one for one in self.cells if (one.load, one.layout) == (load, layout)), None)

    def slo(self, load: str) -> SloTargets:
        return SloTargets(**self.loads[load]["objectives"])


def begin(path: Path, environment: Mapping[str, Any], arguments: Mapping[str, Any], *, anew: bool) -> Results:
    """Go on with the file at `path`, or begin. Raises `ConfigError` if it holds a measurement of something else."""
    if anew or not path.exists():
        return Results(environment=environment, arguments=arguments)
    found = read(path)
    unlike = sorted(name for name in arguments if arguments[name] != found.arguments.get(name))
    if unlike:
        raise ConfigError(
            f"--report {path}: was measured with other {', '.join(unlike)}; give the same, another name, or --anew"
        )
    return found


def read(path: Path) -> Results:
    try:
        return msgspec.convert(json.loads(path.read_text()), Results)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"--report {path}: is no result of this benchmark: {error}") from None


def write(results: Results, path: Path) -> None:
    """Replace the file at once: an interrupted run leaves a whole one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    new.replace(path)


def load_entry(slo: SloTargets, lengths: Sequence[tuple[int, int]], *, chunk: int) -> dict[str, Any]:
    """`chunk`: most prompt tokens of a step of tuned layouts."""
    prompts, answers = zip(*lengths, strict=True)
    return {
        "objectives": asdict(slo),
        "chunk": chunk,
        "prompt_tokens": sum(prompts) / len(prompts),
        "answer_tokens": sum(answers) / len(answers),
    }
