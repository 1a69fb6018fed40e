"""Which rank holds which expert, so that ranks have about as much to do. Pure.

Slots are the places of experts, numbered rank by rank, as many on each. A placement names the expert of each slot; an expert whose load is
large may have several. The algorithm is that of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): groups of experts go to nodes, in a node
the expert with the largest load for each of its copies gets one more, and copies go to the node's ranks, the heaviest first to the
lightest with room. Equal loads go by the lower number, so all ranks compute the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Placement = tuple[int, ...]


def trivial(experts: int, *, slots: int) -> Placement:
    """In order; the slots beyond hold the first experts again."""
    return tuple(slot % experts for slot in range(slots))


def balanced(loads: Sequence[float], *, slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> Placement:
    """The placement for the `loads` of experts. `groups`: of neighbouring experts, which stay in a node if nodes divide them."""
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
    """Return the load of each rank; an expert's copies share its load equally."""
    shares = [loads[expert] / placement.count(expert) for expert in placement]
    each = len(placement) // ranks
    return [sum(shares[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def imbalance(placement: Sequence[int], loads: Sequence[float], *, ranks: int) -> float:
    """The largest load of a rank over the mean: 1 is even. Without any load 1."""
    of_ranks = rank_loads(placement, loads, ranks=ranks)
    return max(of_ranks) * ranks / total if (total := sum(of_ranks)) else 1.0


def _packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Places of `weights` in packs of equal numbers: the heaviest first, each to the lightest pack with room."""
    room = len(weights) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    sums = [0.0] * packs
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        pack = min((pack for pack in range(packs) if len(found[pack]) < room), key=lambda pack: sums[pack])
        found[pack].append(place)
        sums[pack] += weights[place]
    return found


def _replicated(loads: Sequence[float], slots: int) -> list[int]:
    """The expert of each slot: each once, then one by one that with the most load for a copy."""
    copies = [1] * len(loads)
    found = list(range(len(loads)))
    for _ in range(slots - len(loads)):
        most = max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])
        copies[most] += 1
        found.append(most)
    return found


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """The experts' places at the start, by layer of the model (none: in order, with `redundant` slots beyond one each), and how they move:

    every `rebalance_every` steps (0: never), with the `groups` of the model's router kept in one of `nodes` machines.
    """

    redundant: int = 0
    start: Mapping[int, Placement] = field(default_factory=dict)
    rebalance_every: int = 0
    groups: int = 1
    nodes: int = 1

    def placement(self, layer: int, experts: int) -> Placement:
        return self.start.get(layer) or trivial(experts, slots=experts + self.redundant)


IN_ORDER = ExpertPlan()
