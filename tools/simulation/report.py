"""Figures of a soak, and the page that they go into (docs/reports/simulation.md); report.md is its text."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from deploy.bench.environment import commit
from tools.mutants.planting import bugs_of
from tools.simulation.options import load_scenario, scenario_paths
from tools.simulation.run import Outcome


@dataclass
class Total:
    """Sums over runs."""

    num_seeds: int = 0
    num_events: int = 0
    real_s: float = 0.0
    virtual_s: float = 0.0
    longest_rest_s: float = 0.0
    workers: Counter[int] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)
    first_seed: int | None = None

    def add(self, outcome: Outcome) -> None:
        options = outcome.options
        self.first_seed = options.seed if self.first_seed is None else self.first_seed
        self.num_seeds += 1
        self.num_events += outcome.num_events
        self.real_s += outcome.real_s
        self.virtual_s += outcome.virtual_s
        self.longest_rest_s = max(self.longest_rest_s, outcome.settled_s)
        self.workers[options.num_prefill + options.num_decode] += 1
        self.injected.update(outcome.injected)
        self.outcomes.update(outcome.outcomes)
        self.seen.update(outcome.seen)
        if not outcome.ok:
            self.failed.append((options.seed, outcome.problem))

    @property
    def rate(self) -> float:
        """Events a second of one core."""
        return self.num_events / max(self.real_s, 1e-9)

    def text(self) -> str:
        lines = [
            f"{self.num_seeds} seeds ({self.first_seed} and up), {self.num_events} events, {self.rate:,.0f} events per second",
            f"{self.virtual_s / 3600:.1f} hours of virtual time in {self.real_s / 60:.1f} minutes",
            f"answers {dict(self.outcomes)}; longest wait for rest after the faults {self.longest_rest_s:.1f} s (virtual)",
            f"writes {dict(self.seen)}; faults {dict(self.injected.most_common())}",
        ]
        return "\n".join(lines + [f"FAILED seed {seed}: {problem[:200]}" for seed, problem in self.failed])


def write(total: Total, path: Path) -> None:
    """Write the page."""
    bugs = (bug for table in ("cluster", "encoders") for bug in bugs_of(table).values())
    path.write_text(
        Path(__file__)
        .with_name("report.md")
        .read_text()
        .format(
            total=total,
            commit=commit() or "a tree without git",
            workers=", ".join(f"{n}: {c} runs" for n, c in sorted(total.workers.items())),
            hours=total.virtual_s / 3600,
            minutes=total.real_s / 60,
            writes=total.seen["writes"] + total.seen["late writes"],
            num_failed=len(total.failed),
            faults=_rows(total.injected),
            seen=_rows(total.seen),
            bugs="\n".join(map(_bug_line, scenario_paths())) or "| none yet | | | |",
            planted="\n".join(f"- {bug.name}: {bug.what}" for bug in bugs),
        )
    )


def _rows(counts: Counter[str]) -> str:
    return "\n".join(f"| {what} | {count} |" for what, count in sorted(counts.items()))


def _bug_line(path: Path) -> str:
    found = load_scenario(path)
    return f"| `{path.stem}` | {found.found} | {found.what} | {found.fix} |"
