"""A small queueing world in virtual time: workers that compute prompts first and then give each answer a token a step."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from router.choice.where import ANSWER_WEIGHT, Ask, Candidate, Figures, FittedLine, decide
from router.history.forecast import LineFit

PREFILL, DECODE = 0, 1  # ids of the workers
ROUTES = {
    "pair": Candidate("pair", (PREFILL, DECODE)),
    "decode": Candidate("decode", (DECODE,)),
    "prefill": Candidate("prefill", (PREFILL,)),
}


class Speeds(NamedTuple):
    prompt: FittedLine = FittedLine(0.004, 1e-4)
    step: FittedLine = FittedLine(0.012, 0.0004)
    handover: FittedLine = FittedLine(0.008, 2e-6)


class Arrival(NamedTuple):
    at_s: float
    prompt: int
    answer: int


@dataclass(eq=False)
class Running:
    arrival: Arrival
    left: int
    to: "Station | None"  # that answers, if another
    first_s: float = 0.0
    end_s: float = 0.0
    beside: int = 0  # answers there when it began


@dataclass(eq=False)
class Station:
    speeds: Speeds
    prompts: deque[Running] = field(default_factory=deque)
    answers: list[Running] = field(default_factory=list)
    busy: bool = False
    waiting_tokens: int = 0
    itl: LineFit = field(default_factory=LineFit)  # as the router measures it

    @property
    def figures(self) -> Figures:
        return Figures(
            self.speeds.prompt,
            FittedLine(self.itl.intercept, self.itl.slope) if self.itl.is_known else self.speeds.step,
            waiting_tokens=self.waiting_tokens,
            answers=len(self.answers) + sum(one.to is None for one in self.prompts),
            handover=self.speeds.handover,
        )


Choose = Callable[[Arrival, dict[int, Figures]], Candidate]


class World:
    """Two workers; `choose` decides where each request goes."""

    def __init__(self, choose: Choose, speeds: Speeds) -> None:
        self._choose = choose
        self.stations = [Station(speeds), Station(speeds)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self.ended: list[Running] = []

    def run(self, load: Sequence[Arrival]) -> float:
        """The mean seconds to the first token, and of the answer with their weight in a price."""
        for arrival in load:
            self._at(arrival.at_s, lambda now_s, one=arrival: self._arrive(one, now_s))  # type: ignore[misc]
        while self._events:
            now_s, _, act = heappop(self._events)
            act(now_s)
        assert len(self.ended) == len(load)
        waits = [one.first_s - one.arrival.at_s + ANSWER_WEIGHT * (one.end_s - one.first_s) for one in self.ended]
        return sum(waits) / len(load)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._order), act))

    def _arrive(self, arrival: Arrival, now_s: float) -> None:
        figures = {at: one.figures for at, one in enumerate(self.stations)}
        chosen = self._choose(arrival, figures)
        first, last = self.stations[chosen.workers[0]], self.stations[chosen.workers[-1]]
        first.prompts.append(Running(arrival, arrival.answer, None if first is last else last))
        first.waiting_tokens += arrival.prompt
        self._go_on(first, now_s)

    def _go_on(self, station: Station, now_s: float) -> None:
        if station.busy or not (station.prompts or station.answers):
            return
        station.busy = True
        if station.prompts:
            prompt = station.prompts.popleft()
            self._at(
                now_s + station.speeds.prompt.at(prompt.arrival.prompt), lambda s: self._computed(station, prompt, s)
            )
        else:
            step_s = station.speeds.step.at(len(station.answers))
            self._at(now_s + step_s, lambda s: self._stepped(station, list(station.answers), s))

    def _computed(self, station: Station, prompt: Running, now_s: float) -> None:
        station.busy = False
        station.waiting_tokens -= prompt.arrival.prompt
        if prompt.to is None:
            station.answers.append(prompt)
        else:
            to = prompt.to
            arrives_s = now_s + station.speeds.handover.at(prompt.arrival.prompt)
            self._at(arrives_s, lambda s: (to.answers.append(prompt), self._go_on(to, s)))  # type: ignore[func-returns-value]
        self._go_on(station, now_s)

    def _stepped(self, station: Station, answers: Sequence[Running], now_s: float) -> None:
        station.busy = False
        for one in answers:
            one.left -= 1
            if not one.first_s:
                one.first_s, one.beside = now_s, len(answers)
            if one.left == 0:
                one.end_s = now_s
                station.answers.remove(one)
                self.ended.append(one)
                if one.arrival.answer > 1:
                    station.itl.add(
                        (one.beside + len(station.answers)) / 2, (now_s - one.first_s) / (one.arrival.answer - 1), now_s
                    )
        self._go_on(station, now_s)


def fixed(route: str) -> Choose:
    return lambda arrival, figures: ROUTES[route]


def auto(arrival: Arrival, figures: dict[int, Figures]) -> Candidate:
    return decide(list(ROUTES.values()), Ask(arrival.prompt, arrival.answer), figures).chosen


def load_of(
    *, rate: float, prompts: Sequence[int], answers: Sequence[int], seconds: float = 200.0, seed: int = 1
) -> list[Arrival]:
    """Poisson arrivals of these lengths."""
    draw, at_s, found = random.Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        found.append(Arrival(at_s, draw.choice(prompts), draw.choice(answers)))
    return found
