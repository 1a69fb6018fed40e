"""Which steps of this worker's ranks are faster in two halves: measured at start, on the ranks that serve.

    decode steps, prompt steps    two sizes each: whole | in halves | whole | in halves ...   medians

A size is halved if that was faster there and at each larger size that was measured. Ranks run the same steps; with DP attention each
measures, and the figures of one count for all (engine/core/dp_step.py).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from engine.config import EngineConfig
from engine.core.dp_step import Row, agree
from engine.core.plan import Plan
from engine.core.split_rule import SplitRule
from engine.core.two_batches import WHOLE, Splitter
from engine.executor.warm_up import WarmUp, closing

log = logging.getLogger(__name__)

REPEATS = 5  # of each size, beside a first time that does not count
LESS = 0.97  # of a whole step's time: halves that take more are noise
ALWAYS = SplitRule(2, 2)  # --enable-two-batch-overlap on
SHARES = (4, 1)  # sizes: the largest step, and a quarter of it


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians of steps of `rows` rows."""

    extend: bool
    rows: int
    whole_s: float
    halves_s: float

    @property
    def is_faster(self) -> bool:
        return self.halves_s < LESS * self.whole_s

    def __str__(self) -> str:
        step = "prompt" if self.extend else "decode"
        return f"{step} steps of {self.rows} rows: {1e3 * self.whole_s:.2f} ms whole, {1e3 * self.halves_s:.2f} ms in halves"


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """`times`: none where nothing was measured."""

    mode: str
    rule: SplitRule
    times: Sequence[StepTimes] = field(default=())

    def described(self) -> dict[str, int | str]:
        """Return the split for /server_info. A `_from` of 0: never."""
        return {
            "two_batch_overlap": self.mode,
            "two_batch_decodes_from": self.rule.decodes_from,
            "two_batch_prompts_from": self.rule.prompts_from,
            "two_batch_times": "; ".join(map(str, self.times)),
        }


def choose(
    config: EngineConfig, steps: WarmUp, run: Callable[[Plan], None], *, prompt_tokens: int, attention_tokens: float
) -> SplitChoice | None:
    """Return which steps are halved, logged; None: the flag is off. `prompt_tokens`: of the largest prompt step to measure.

    Raises what `run` raises.
    """
    mode = config.enable_two_batch_overlap
    if not config.splits_steps:
        return None
    if mode == "on":
        return SplitChoice(mode, ALWAYS)
    sizes = [(False, rows) for rows in _sizes(steps.rows)] if steps.decodes else []
    sizes += [(True, rows) for rows in _sizes(prompt_tokens)]
    splitter = Splitter(ALWAYS, attention_tokens=attention_tokens)
    times = measured(run, [StepSize(config, steps, splitter, *size) for size in sizes])
    choice = SplitChoice(mode, rule_of(times), times)
    for one in times:
        log.info("two-batch overlap: %s", one)
    log.info(
        "two-batch overlap: decode steps %s, prompt steps %s",
        *(f"from {least} rows" if least else "never" for least in (choice.rule.decodes_from, choice.rule.prompts_from)),
    )
    return choice


def rule_of(times: Sequence[StepTimes]) -> SplitRule:
    """Return from which size on halves were faster at all sizes."""
    return SplitRule(*(_least([one for one in times if one.extend is extend]) for extend in (False, True)))


def _least(times: Sequence[StepTimes]) -> int:
    least = 0
    for one in sorted(times, key=lambda one: -one.rows):
        if not one.is_faster:
            break
        least = one.rows
    return least


def _sizes(most: int) -> list[int]:
    return sorted({rows for share in SHARES if (rows := most // share) > 1})


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step of `rows` rows on each DP rank. `splitter`: that cuts it."""

    config: EngineConfig
    steps: WarmUp
    splitter: Splitter
    extend: bool
    rows: int

    def plan(self, *, halved: bool) -> Plan:
        plan = self.steps.of_size(self.rows, extend=self.extend)
        plan.cut = self.splitter.cut(plan.items, extend=self.extend) if halved else WHOLE
        if self.config.enable_dp_attention:
            tokens = sum(item.q_len for item in plan.items)
            row = Row(
                step=0,
                idle=False,
                tokens=tokens,
                extend=self.extend,
                can_graph=not self.extend,
                cut=plan.cut,
                decodes_from=ALWAYS.decodes_from,
                prompts_from=ALWAYS.prompts_from,
            )
            plan.agreed = agree([row] * self.config.dp_size)
        return plan


def measured(run: Callable[[Plan], None], sizes: Sequence[StepSize], *, repeats: int = REPEATS) -> list[StepTimes]:
    """Run both forms of each size in turns. All ranks run equally many steps."""
    plans = closing([plan for size in sizes for plan in _plans(size, repeats)])
    seconds = [_timed(run, plan) for plan in plans]
    found, each = [], 2 * (1 + repeats)
    for i, size in enumerate(sizes):
        of_size = seconds[i * each + 2 : (i + 1) * each]
        found.append(StepTimes(size.extend, size.rows, median(of_size[::2]), median(of_size[1::2])))
    return found


def _plans(size: StepSize, repeats: int) -> Iterator[Plan]:
    for _ in range(1 + repeats):
        yield size.plan(halved=False)
        yield size.plan(halved=True)


def _timed(run: Callable[[Plan], None], plan: Plan) -> float:
    begun_s = time.perf_counter()
    run(plan)
    return time.perf_counter() - begun_s
