"""Balanced placement of experts on ranks. Pure.

A placement has the expert of each slot, numbered by rank; loaded experts have several. As in
DeepSeek's EPLB (github.com/deepseek-ai/EPLB): groups go to nodes; experts with the most load per
copy get copies; the heaviest copies go first to the lightest ranks. Ties take the lower number, so
all ranks agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Placement = tuple[int, ...]


def trivial(experts: int, *, slots: int) -> Placement:
    """Experts in order; extra slots repeat the first ones."""
    return tuple(slot % experts for slot in range(slots))


def balanced(loads: Sequence[float], *, slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> Placement:
    """`groups` stay in a node if nodes divide them."""
    assert slots % ranks == 0 and slots >= len(loads) > 0, (slots, ranks, len(loads))
    if nodes == 1 or groups % nodes or ranks % nodes or len(loads) % groups:
        groups = nodes = 1
    size, placement = len(loads) // groups, list[int]()
    of_groups = [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    for of_node in _packed(of_groups, nodes):
        experts = [group * size + expert for group in sorted(of_node) for expert in range(size)]
        copies = _replicated([loads[expert] for expert in experts], slots // nodes)
        shares = [loads[experts[one]] / copies.count(one) for one in copies]
        for of_rank in _packed(shares, ranks // nodes):
            placement += [experts[copies[copy]] for copy in of_rank]
    return tuple(placement)


def rank_loads(placement: Sequence[int], loads: Sequence[float], *, ranks: int) -> list[float]:
    shares = [loads[expert] / placement.count(expert) for expert in placement]
    each = len(placement) // ranks
    return [sum(shares[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def imbalance(placement: Sequence[int], loads: Sequence[float], *, ranks: int) -> float:
    of_ranks = rank_loads(placement, loads, ranks=ranks)
    return max(of_ranks) * ranks / total if (total := sum(of_ranks)) else 1.0


def _packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    room = len(weights) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    sums = [0.0] * packs
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        pack = min((pack for pack in range(packs) if len(found[pack]) < room), key=lambda pack: sums[pack])
        found[pack].append(place)
        sums[pack] += weights[place]
    return found


def _replicated(loads: Sequence[float], slots: int) -> list[int]:
    copies = [1] * len(loads)
    found = list(range(len(loads)))
    for _ in range(slots - len(loads)):
        most = max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])
        copies[most] += 1
        found.append(most)
    return found


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """Initial placement by layer (default: in order), and its updates.

    Every `rebalance_every` steps (0: never); router `groups` stay in one of `nodes` machines.
    """

    redundant: int = 0
    start: Mapping[int, Placement] = field(default_factory=dict)
    rebalance_every: int = 0
    groups: int = 1
    nodes: int = 1

    def placement(self, layer: int, experts: int) -> Placement:
        return self.start.get(layer) or trivial(experts, slots=experts + self.redundant)


IN_ORDER = ExpertPlan()
