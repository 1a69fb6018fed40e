"""Expert parallelism load balancing (EPLB): moves experts between ranks while steps run.

every N steps    loads since the last round -> a placement per layer, equal on all ranks
layer by layer   a thread reads the rank's next experts -> ranks vote before each step -> once
                 all have read, all switch before that step; one failure: none switches

A vote is an all-reduce. Meanwhile both copies of a layer are in memory. On GPUs votes are host
syncs, so they are rarer.
"""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.parallel.collectives import Collectives
from engine.parallel.expert_placement import Placement, balanced, imbalance
from service.waiter import start_in_thread

log = logging.getLogger(__name__)

READING, READ, FAILED = range(3)  # votes
VOTE_EVERY_ON_GPU = 16  # steps


class Movable(Protocol):
    """Experts of a layer. `moved` may run in any thread, `take` between steps."""

    loads: Tensor
    placed: Any

    def moved(self, placement: Placement) -> Any: ...

    def take(self, moved: Any) -> None: ...


class ExpertBalance:
    """`groups`: of the router; `nodes`: machines of `ranks`."""

    def __init__(self, ranks: Collectives, *, every: int, groups: int, nodes: int) -> None:
        self._ranks = ranks
        self._every = every
        self._groups, self._nodes = groups, nodes
        self.layers: list[Movable] = []
        self._seen: list[Tensor] = []  # loads at the last round
        self._steps = 0
        self._wanted: dict[int, Placement] = {}  # by layer; the first is being read
        self._moving: Future[Any] | None = None
        self.rounds = self.moved_layers = self.failed_layers = 0
        self.before = self.after = (
            1.0  # mean over layers of the largest rank's load over the mean one, at the last round
        )

    def add(self, layer: Movable) -> None:
        self.layers.append(layer)
        self._seen.append(layer.loads.clone())

    def on_step(self) -> None:
        """Called before each step, in the steps' thread."""
        if not self.layers:
            return  # only dense layers in this stage
        self._steps += 1
        if self._steps % self._every == 0 and not self._wanted:
            self._plan()
        vote_every = VOTE_EVERY_ON_GPU if self.layers[0].loads.is_cuda else 1
        if self._wanted and self._steps % vote_every == 0:
            self._move(next(iter(self._wanted)))

    def imbalances(self) -> list[float]:
        return [self._imbalance(self.layers[place].placed.placement, self._loads(place)) for place in self._places]

    @property
    def _places(self) -> range:
        return range(len(self.layers))

    def _plan(self) -> None:
        before, after = [], []
        for place in self._places:
            loads, slots = self._loads(place), self.layers[place].placed.placement
            found = balanced(loads, slots=len(slots), ranks=self._ranks.size, groups=self._groups, nodes=self._nodes)
            now, then = (self._imbalance(placement, loads) for placement in (slots, found))
            if then < now:
                self._wanted[place] = found
            before.append(now)
            after.append(min(now, then))
            self._seen[place] = self.layers[place].loads.clone()
        self.rounds += 1
        self.before, self.after = sum(before) / len(before), sum(after) / len(after)
        log.info(
            "experts: the most loaded rank has %.2f times the mean, and %.2f once %d of %d layers have moved",
            self.before,
            self.after,
            len(self._wanted),
            len(before),
        )

    def _move(self, place: int) -> None:
        layer, placement = self.layers[place], self._wanted[place]
        if self._moving is None:
            self._moving = start_in_thread(lambda: _moved(layer, placement), name="experts", when_done=lambda: None)
        votes = self._votes(self._moving)
        if FAILED in votes:
            if self._moving.done() and (error := self._moving.exception()) is not None:
                log.warning("experts of a layer stay where they are: %s", error)
            self.failed_layers += 1
        elif READING in votes:
            return
        else:
            layer.take(self._moving.result())
            self.moved_layers += 1
        self._moving = None
        del self._wanted[place]

    def _votes(self, moving: "Future[Any]") -> list[int]:
        own = torch.zeros((1, self._ranks.size), device=self.layers[0].loads.device)
        if moving.done():
            own[0, self._ranks.rank] = READ if moving.exception() is None else FAILED
        return [int(vote) for vote in self._ranks.sum(own, dtype=torch.float32)[0].tolist()]

    def _loads(self, place: int) -> list[int]:
        loads: list[int] = (self.layers[place].loads - self._seen[place]).tolist()
        return loads

    def _imbalance(self, placement: Placement, loads: list[int]) -> float:
        return imbalance(placement, loads, ranks=self._ranks.size)


def _moved(layer: Movable, placement: Placement) -> Any:
    torch.set_num_threads(1)  # in this thread; steps use the other cores
    return layer.moved(placement)


# ---- Metrics of load over experts and ranks.


def expert_gauges(loads: Mapping[int, Tensor], balance: ExpertBalance | None) -> dict[str, float]:
    """Metrics by name, empty without mixtures; `loads`, by layer, may include a running step."""
    if not loads:
        return {}
    found = {"expert_imbalance": _mean(_uneven(layer.tolist()) for layer in loads.values())}
    if balance is None:
        return found
    return found | {
        "expert_rank_imbalance": _mean(balance.imbalances()),
        "expert_rank_imbalance_before": balance.before,
        "expert_rank_imbalance_after": balance.after,
        "expert_rebalances": float(balance.rounds),
        "expert_moved_layers": float(balance.moved_layers),
        "expert_failed_layers": float(balance.failed_layers),
    }


def expert_loads(loads: Mapping[int, Tensor], num_layers: int) -> list[list[int]]:
    """Tokens per expert by layer, zeros for other layers."""
    if not loads:
        return []
    count = len(next(iter(loads.values())))
    return [loads[layer].tolist() if layer in loads else [0] * count for layer in range(num_layers)]


def _uneven(loads: list[int]) -> float:
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 1.0
