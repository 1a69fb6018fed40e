"""Figures of a soak, and the page that they go into (docs/reports/simulation.md); report.md is its text."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from deploy.bench.environment import commit
from tools.mutants.planting import bugs_of
from tools.simulation import scenario
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

    def text(self) -> str:
        rate = self.num_events / max(self.real_s, 1e-9)
        lines = [
            f"{self.num_seeds} seeds ({self.first_seed} and up), {self.num_events} events, {rate:,.0f} events per second",
            f"{self.virtual_s / 3600:.1f} hours of virtual time in {self.real_s / 60:.1f} minutes",
            f"answers {dict(self.outcomes)}; longest wait for rest after the faults {self.longest_rest_s:.1f} s (virtual)",
            f"writes {dict(self.seen)}; faults {dict(self.injected.most_common())}",
        ]
        return "\n".join(lines + [f"FAILED seed {seed}: {problem[:200]}" for seed, problem in self.failed])


def write(total: Total, path: Path) -> None:
    """Write the page."""
    template = Path(__file__).with_name("report.md").read_text()
    faults = "\n".join(f"| {kind} | {count} |" for kind, count in sorted(total.injected.items()))
    bugs = "\n".join(_bug_line(p) for p in scenario.all_paths()) or "| none yet | | | |"
    figures = f"""| | |
|---|---|
| commit | {commit() or "a tree without git"} |
| seeds run | {total.num_seeds} ({total.first_seed} and up) |
| workers of a cluster | {", ".join(f"{n}: {c} runs" for n, c in sorted(total.workers.items()))} |
| events | {total.num_events} |
| events per second (one core) | {total.num_events / max(total.real_s, 1e-9):,.0f} |
| virtual time | {total.virtual_s / 3600:.1f} hours, in {total.real_s / 60:.1f} minutes |
| requests answered right / with an error / left by the client | {total.outcomes["ok"]} / {total.outcomes["error"]} / {total.outcomes["left"]} |
| transfer writes judged; of these after their operation had failed | {total.seen["writes"] + total.seen["late writes"]}; {total.seen["late writes"]} |
| longest time from the last fault to full rest (virtual) | {total.longest_rest_s:.1f} s |
| failed | {len(total.failed)} |"""
    seen = "\n".join(f"| {what} | {count} |" for what, count in sorted(total.seen.items()))
    planted = "\n".join(
        f"- {bug.name}: {bug.what}" for table in ("cluster", "encoders") for bug in bugs_of(table).values()
    )
    path.write_text(
        template.replace("{{figures}}", figures)
        .replace("{{faults}}", faults)
        .replace("{{bugs}}", bugs)
        .replace("{{planted}}", planted)
        .replace("{{seen}}", seen)
    )


def _bug_line(path: Path) -> str:
    found = scenario.load(path)
    return f"| `{path.stem}` | {found.found} | {found.what} | {found.fix} |"
