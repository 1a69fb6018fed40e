"""Writes the page and pictures of goodput, and README's part, from the JSON of what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.goodput import results
from benchmarks.goodput.calibrate import Calibration
from benchmarks.goodput.layouts import LAYOUTS, Layout
from benchmarks.goodput.loads import RUN_S
from benchmarks.goodput.results import Cell, Results
from deploy.bench.stats import table
from service.flags import ConfigError

REPORT, README = Path("docs/reports/goodput"), Path("README.md")
BEGIN, END = "<!-- goodput: by make goodput -->\n", "<!-- /goodput -->\n"
COLORS = ("#b8c0c8", "#8a95a1", "#5d6d7e", "#9467bd", "#1f77b4", "#56b4e9", "#17807e", "#e07b39")  # of layouts
MODES = {"": ("white", "#222222"), "-dark": ("#0d1117", "#e6edf3")}  # by file name: ground, ink


def write(report: Path) -> None:
    """Write `report`.md and its pictures, light and dark, from `report`*.json; and README's part."""
    report.with_suffix(".md").write_text(page_of(report))
    found = measured(report).get(report.name)
    if found is None:
        return
    if report == REPORT:
        README.write_text(with_block(README.read_text(), readme(found)))
    for mode, (ground, ink) in MODES.items():
        plot(found, report.with_name(f"{report.name}{mode}.png"), ground=ground, ink=ink)


def measured(report: Path) -> dict[str, Results]:
    """Return what was measured so far, by the names of its files without an ending: `report` first."""
    paths = sorted(report.parent.glob(f"{report.name}*.json"), key=lambda path: len(path.name))
    return {path.stem: results.read(path) for path in paths}


def page_of(report: Path) -> str:
    """Return the text of the page: a part for each measurement whose JSON is there, and what was planned once."""
    parts = [section(found, name.removeprefix(report.name), report.name) for name, found in measured(report).items()]
    return Path(__file__).with_suffix(".md").read_text().format(parts="\n".join(parts))


def readme(found: Results) -> str:
    """Return README's part."""
    name = f"docs/reports/{REPORT.name}"
    alt = "Goodput of unified workers, pairs and a mixed pool, by load"
    return f"""
## Where PD pays

Requests a second within objectives, on the same {found.arguments["cores"]} cores ([more]({name}.md)).
{winners(found)}

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">
  <img alt="{alt}" src="{name}.png">
</picture>

"""


def with_block(text: str, block: str) -> str:
    """Put `block` between the two marks of README."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"README.md: the marks {BEGIN} and {END} are gone; put them where the figures belong")
    return head + BEGIN + block + END + tail


def section(found: Results, more: str, name: str) -> str:
    """Write the part of one measurement. `more`: what the name of its file has behind `name`, as "_pdmux"."""
    env = found.environment
    parts = [
        f"## On {found.arguments['cores']} cores{more.replace('_', ', ')}",
        about(found),
        goodput_table(found),
        verdict(found),
        "" if more else f"![Goodput of each layout, by load]({name}.png)",
        f"Run `{env['command']}` at commit {env['commit']}, {env['time']}; {env['cpu']}, {env['cores']} cores.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def about(found: Results) -> str:
    """Say what was compared."""
    host = msgspec.convert(found.calibration, Calibration)
    alone, trace = host.alone, found.arguments["trace"]
    least = min((run["cores_left"] for cell in found.cells for run in cell.runs), default=host.cores_left)
    while_alone = "" if host.cores_left >= least else f" ({host.cores_left:.1f} while latencies alone were measured)"
    at_once = any(one.multiplexed and one.name in {cell.layout for cell in _done(found)} for one in LAYOUTS)
    multiplexed = ", or prompts and decodes at the same time (`--enable-pdmux`)" if at_once else ""
    lengths = f"Mooncake's {trace} trace" if trace else "lengths as in Mooncake's conversation trace"
    return (
        f"Real processes, HTTP and NIXL, each cluster on the same {found.arguments['cores']} cores. Unified: a thread on each core, prompts "
        f"first, or with mixed chunks: of 1024 tokens (the default), or as many as the objective for ITL allows (tuned){multiplexed}. Pair: a half of the cores for prefill, "
        "the other for decode; pages leave whole, or layer by layer; or both workers on all cores, as `tandem up` starts them. Mixed pool: "
        f"a pair and a unified worker (`--mixed`), all on all cores. {found.arguments['layers']} layers as wide as Qwen3-0.6B's, random bf16 weights; {lengths}, scaled; "
        f"runs of {RUN_S:g} s; others left {least:.1f} cores or more{while_alone}. On half of the cores, alone: {1e6 * alone.prompt_token_s:.0f} us a prompt token, "
        f"{' '.join([f'{1e3 * alone.step_s:.0f} ms a step with four answers.', *found.remarks])}"
    )


def goodput_table(found: Results) -> str:
    """A row for each load; of the layouts the best is bold."""
    layouts = [one for one in LAYOUTS if any(cell.layout == one.name for cell in _done(found))]
    rows = []
    for load, entry in found.loads.items():
        rates = [goodput(found, load, one) for one in layouts]
        if any(rate is not None for rate in rates):
            tokens = f"{entry['prompt_tokens']:.0f}, {entry['answer_tokens']:.0f}"
            wanted = ", ".join(f"{1000 * entry['objectives'][name]:g}" for name in ("ttft_s", "itl_s"))
            rows.append([load, tokens, wanted, *_bold(rates)])
    return table(["load", "tokens in, out", "TTFT, ITL, ms", *(one.name for one in layouts)], rows)


def goodput(found: Results, load: str, layout: Layout) -> float | None:
    """Return the highest rate that was kept (0: none was); None: not measured."""
    cell = found.cell(load, layout.name)
    if cell is None or not cell.done:
        return None
    best = cell.search(found.slo(load)).best
    return best.rate if best else 0.0


def winners(found: Results) -> str:
    """Say in a sentence which layout is best under which loads."""
    best: dict[str, list[str]] = {}
    for load in found.loads:
        rates = {one.name: rate for one in LAYOUTS if (rate := goodput(found, load, one)) is not None}
        if rates and max(rates.values()) > 0:
            best.setdefault(max(rates, key=rates.__getitem__), []).append(load)
    return " ".join(f"Best for {' and for '.join(loads)}: {name}." for name, loads in best.items())


def verdict(found: Results) -> str:
    """Say for each load which layout wins, and over the best unified one by how much."""
    lines = []
    for load in found.loads:
        rates = {one: rate for one in LAYOUTS if (rate := goodput(found, load, one)) is not None}
        unified = max((rate for one, rate in rates.items() if one.is_unified), default=None)
        others = {one.name: rate for one, rate in rates.items() if not one.is_unified}
        if unified is not None and others:
            best = max(others, key=others.__getitem__)
            compared = f"{others[best] / unified:.2f} times" if unified else "none of"
            lines.append(
                f"- {load}: {best} {others[best]:.3g} a second, {compared} what the best unified worker serves."
            )
    return "\n".join(lines)


def plot(found: Results, path: Path, *, ground: str, ink: str) -> None:
    """Draw a panel for each load: a bar for each layout."""
    import matplotlib  # a dev extra; a headless backend before anything else

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = [load for load in found.loads if any(cell.load == load for cell in _done(found))]
    if not loads:
        return
    with plt.rc_context(
        {"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink}
    ):
        figure, panels = plt.subplots(1, len(loads), figsize=(3.1 * len(loads), 2.7), squeeze=False, sharey=True)
        figure.set_facecolor(ground)
        for panel, load in zip(panels.flat, loads, strict=True):
            _panel(panel, found, load)
            panel.set_facecolor(ground)
        panels.flat[0].invert_yaxis()
        figure.supxlabel("good requests a second", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=110, facecolor=ground)
        plt.close(figure)


def _panel(panel: Any, found: Results, load: str) -> None:
    shown = [(one, color) for one, color in zip(LAYOUTS, COLORS, strict=True) if goodput(found, load, one) is not None]
    names = [one.name for one, _ in shown]
    panel.barh(names, [goodput(found, load, one) for one, _ in shown], color=[color for _, color in shown])
    objectives = found.loads[load]["objectives"]
    panel.set_title(
        f"{load}\nTTFT {1000 * objectives['ttft_s']:g} ms, ITL {1000 * objectives['itl_s']:g} ms", fontsize=9
    )
    panel.grid(axis="x", alpha=0.3)
    panel.tick_params(labelsize=8)


def _done(found: Results) -> list[Cell]:
    return [cell for cell in found.cells if cell.done]


def _bold(rates: Sequence[float | None]) -> list[str]:
    best = max(rate for rate in rates if rate is not None)
    return ["" if rate is None else f"**{rate:.2f}**" if rate == best > 0 else f"{rate:.2f}" for rate in rates]
