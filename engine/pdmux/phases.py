"""PD multiplexing: prefill and decode steps run in two lanes of one device, concurrently.

    prefill phase   | chunk 1 of A  | chunk 2 of A, B | chunk of E ...
    decode phase    | C D | C D | C D | C D | C D | A B C D | A B C D ...

Steps run in plan order within a phase only. So a request changes to decode once nothing of it is in
flight: it opens an executor row in the new phase and closes the old one (RequestTable). Lanes share
pages: only steps of the holder write them, and others read them after these are collected.

Both phases over one KV pool: Semi-PD (arXiv:2504.19867), Bullet (arXiv:2504.19516), SGLang's
--enable-pdmux; shares of a device: MuxServe (arXiv:2404.02015).
"""

from collections import deque
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core.decode_planning import Items
from engine.core.plan import Phase, Plan
from engine.core.scheduler import OneStream
from engine.flags.pdmux import itl_objective_s

PACE = 0.75  # of the objective: steps vary, and the loop takes time
ROOMY = 0.5  # of the objective: below it with one part less, a part returns
MIN_FOR_PROMPTS = 0.25
HALF = 0.5
NUM_LAST = 5  # steps considered
ENOUGH = 3  # of them, to change the share


class LaneShare:
    """Share in `parts` of the device; `waits`: prompts stop during whole-device decodes.

    Without `waits` a step keeps its share until it ends, so prompts have a part at least.

      ITL objective  |<----------------- itl_s ---------------->|
      decode         | step |                          | step |    due PACE of it after the last
      prefill        | what a step leaves | whole device | ...

    Decode gets the smallest share that ends within PACE of the objective; prompts the rest, at
    least MIN_FOR_PROMPTS of the time. Without objective decode has half. After Semi-PD and
    DynaServe (arXiv:2504.09285).
    """

    def __init__(self, *, parts: int, itl_s: float | None, waits: bool) -> None:
        assert parts >= 1 and (itl_s is None or itl_s > 0)
        self._parts = parts
        self._most = parts if waits or parts == 1 else parts - 1
        self._itl_s = itl_s
        self._waits = waits
        self._taken_s: deque[float] = deque(maxlen=NUM_LAST)
        self.decode_parts = max(1, parts // 2)

    def note(self, taken_s: float) -> None:
        self._taken_s.append(taken_s)
        if self._itl_s is None or len(self._taken_s) < ENOUGH:
            return
        usual_s = self._usual_s
        if usual_s > PACE * self._itl_s and self.decode_parts < self._most:
            self._change(1)
        elif self.decode_parts > 1 and usual_s * self.decode_parts < ROOMY * self._itl_s * (self.decode_parts - 1):
            self._change(-1)

    def parts_of(self, *, concurrent: bool) -> int:
        """Return decode's parts, or 0 for a step without concurrent ones: the whole device."""
        return self.decode_parts if concurrent or self._waits else 0

    def due_s(self, launched_s: float, joined_s: float | None = None) -> float:
        """Return when a decode step is due after `launched_s`, during prefill.

        `joined_s`: first token of the oldest request not yet decoded; its next is due within the
        objective.
        """
        due_s = launched_s + max(self._pace_s, self._left_s)
        if joined_s is None:
            return due_s
        usual_s = self._usual_s if self._taken_s else 0.0
        return min(due_s, max(launched_s + self._left_s, joined_s + max(0.0, self._pace_s - usual_s)))

    @property
    def _pace_s(self) -> float:
        own_parts = self._parts > self._most  # prompts cannot use what decodes leave
        return 0.0 if self._itl_s is None or own_parts else PACE * self._itl_s

    @property
    def _left_s(self) -> float:
        """Step interval that leaves prompts some time, if decode has all parts."""
        if not self._waits or self.decode_parts < self._parts or not self._taken_s:
            return 0.0
        return self._usual_s / (HALF if self._itl_s is None else 1 - MIN_FOR_PROMPTS)

    @property
    def _usual_s(self) -> float:
        return sorted(self._taken_s)[len(self._taken_s) // 2]

    def _change(self, by: int) -> None:
        self.decode_parts += by
        self._taken_s.clear()

    def gauges(self) -> dict[str, float]:
        return {"decode_share": self.decode_parts / self._parts}


def lane_share(config: EngineConfig, *, parts: int) -> LaneShare:
    """`parts`: of the device."""
    return LaneShare(parts=parts, itl_s=itl_objective_s(config), waits=config.device == "cpu")


# ---- Divisions of a GPU's multiprocessors (SMs) between decodes and prompts, made at start.

PARTS = 4  # decodes get 1 to 3: a green context cannot be resized


class Grain(NamedTuple):
    """SMs of a green context: at `least`, in steps of `step`."""

    least: int
    step: int


def grain_of(major: int) -> Grain:
    """`major`: of the compute capability (CUDA driver API, "Green Contexts")."""
    if major < 7:
        return Grain(1, 1)
    return Grain(2, 2) if major == 7 else Grain(4, 2) if major == 8 else Grain(8, 8)


def divisions(num_sms: int, grain: Grain, *, parts: int) -> list[int]:
    """Return SMs of decodes: about 1 of `parts`, 2, ...; small GPUs have fewer divisions."""
    wanted = {round(num_sms * part / parts / grain.step) * grain.step for part in range(1, parts)}
    return sorted(sms for sms in wanted if grain.least <= sms <= num_sms - grain.least)


class SmShare:
    """`division` of the next step: 1 has fewest SMs of decodes; 0: the whole GPU."""

    def __init__(self, num_divisions: int) -> None:
        self._num = num_divisions
        self.division = 0

    def give(self, decode_parts: int) -> None:
        assert 0 <= decode_parts <= max(1, self._num)
        self.division = decode_parts if self._num else 0


# ---- planning


class TwoStreams(OneStream):
    def plan(self, now_s: float, *, admits: bool, phase: Phase | None) -> Items:
        assert phase is not None, "each plan has a phase in two streams"
        return self._prefill.plan(now_s, admits=admits) if phase is Phase.PREFILL else self._decode.plan(set(), now_s)

    def enter(self, plan: Plan) -> None:
        for item in plan.items:
            request = self._stages.live[item.rid]
            assert request.phase in (None, plan.phase), f"{request.rid} has steps in two phases"
            request.phase = plan.phase
