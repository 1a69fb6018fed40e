"""Plot of goodput against rate, with the optional matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.run import Outcome
from service.flags import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Check early that a plot is possible. Raises ConfigError."""
    if Path(path).suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: must end in {', '.join(FORMATS)}")
    _figure_class()


def draw(outcomes: Sequence[Outcome], *, share: float, title: str, path: str) -> None:
    """Plot a line per layout; unified ones are dashed, perfect service is grey."""
    figure = _figure_class()(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    highest = max((p.rate for o in outcomes for p in o.points if p.goodput > 0), default=1.0)
    axes.plot([0, highest], [0, highest], color="0.85", linewidth=1, zorder=0)
    for outcome in sorted(outcomes, key=lambda o: -o.rate):
        points = [p for p in outcome.points if p.rate <= 1.05 * highest]
        style = "--" if outcome.layout.unified else "-"
        label = f"{outcome.layout.name}: {outcome.rate:.3g}"
        (line,) = axes.plot([p.rate for p in points], [p.goodput for p in points], style, marker=".", label=label)
        if outcome.best:
            axes.plot([outcome.best.rate], [outcome.best.goodput], "o", color=line.get_color(), markersize=8)
    axes.set(
        xlabel="requests a second and GPU",
        ylabel="of these within the limits",
        title=title,
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(title=f"best rate with {100 * share:g} % good")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; pip install 'tandem-serve[plan]'") from None
    return Figure
