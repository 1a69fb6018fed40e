"""Eviction of named conversations' pages by when the next turn is expected.

LRU order; a conversation's pages count as last used at v (seconds):

    v = min(end, now - g)        g: a gap after the branch's `end` that one in ten exceeds
    v = min(due, 2 * now - due)  if a return at `due` was announced
    superseded or closed         first of all

v <= now, so nothing is pinned. g is learnt from its own gaps and all. A trunk of several
conversations follows LRU; nodes below keep it.

    trunk -- turn 1 -- turn 2    superseded by 2', unless it goes on
                  +--- turn 2'   a tip: the last node of a branch
    other trunk -- turn          a subagent's
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from engine.core.mem_cache.memory_part import MemoryPart
from engine.core.mem_cache.radix_cache import FIRST, EvictionOrder, Match, Node, Rank, TreePart
from engine.core.request import Request

Namespace = tuple[str, ...]

MAX_CONVERSATIONS = 10_000  # remembered
MAX_TIPS = 8  # branches of one that are told apart
PRIOR = 4.0  # gaps that the gaps of all weigh as
TAIL = 1.28  # standard deviations up to a share of 0.9
MEMORY = 1000.0  # gaps of all that are remembered
MAX_SAMPLES = 4096
SUPERSEDED = (FIRST[0] + 1, 0)


@dataclass(slots=True)
class Gaps:
    """Logarithms of gaps in seconds."""

    count: float = 1.0
    mean: float = math.log(0.1)
    square: float = math.log(0.1) ** 2

    def add(self, gap_s: float) -> None:
        value = math.log(max(gap_s, 1e-3))
        self.count = min(self.count + 1, MEMORY)
        self.mean += (value - self.mean) / self.count
        self.square += (value * value - self.square) / self.count

    def tail_s(self, own: "Gaps") -> float:
        """The gap that one in ten exceeds."""
        mean = (own.mean * (own.count - 1) + self.mean * PRIOR) / (own.count - 1 + PRIOR)
        return math.exp(mean + TAIL * math.sqrt(max(0.0, self.square - self.mean**2)))


@dataclass(slots=True, eq=False)
class ConversationBranch:
    ended_s: float = -math.inf  # its last turn
    due_s: float | None = None
    within_s: float = math.inf
    superseded: bool = False
    forks: bool = False  # a superseded one of its trunk went on


@dataclass(slots=True, eq=False)
class KnownConversation:
    """`at`: the tree's clock at its last use."""

    tips: dict[Node, ConversationBranch] = field(default_factory=dict)
    latest: ConversationBranch = field(default_factory=ConversationBranch)  # with the last turn
    gaps: Gaps = field(default_factory=Gaps)
    announces: bool = False
    closed: bool = False
    forgotten: bool = False
    at: int = 0

    def move(self, tip: Node, turn: ConversationBranch) -> list[Node]:
        """Extend the branch that `tip` has most of, or begin one. Return the earlier tips."""
        path, before = dict(path_to(tip)), [old for old in self.tips if old.parent is not None]
        chains = {old: path_to(old) for old in before}
        shared = {old: next((path[node] for node, _ in chains[old] if node in path), 0) for old in before}
        kin = [self.tips[old] for old in before if shared[old]]
        extended = next((old for old in before if 2 * shared[old] >= chains[old][0][1]), None)
        went_on = extended is not None and extended is not tip and self.tips[extended].superseded
        turn.forks = went_on or any(one.forks for one in kin)
        self.tips = {old: self.tips[old] for old in before if old is not extended}
        for one in kin:
            one.forks = turn.forks
            one.superseded = not turn.forks and (extended is None or one.superseded)
        if len(self.tips) >= MAX_TIPS:
            del self.tips[next(iter(self.tips))]
        self.tips[tip] = self.latest = turn
        return before


class ConversationPages(MemoryPart, TreePart):
    """`now_s`: set by the loop."""

    name = "conversations"

    def __init__(self, page_size: int) -> None:
        self.now_s = 0.0
        self.order = EvictionOrder(self.rank)
        self._page_size = page_size
        self._named: OrderedDict[tuple[Namespace, str], KnownConversation] = OrderedDict()
        self._owners: dict[Node, KnownConversation | None] = {}  # None: several
        self._gaps = {False: Gaps(), True: Gaps()}  # True: not announced, of conversations that announce others
        self._times = [-math.inf]
        self._clocks = [0]  # the tree's clock at these times
        self._counts = {"conversation_turns": 0.0, "conversation_hit_tokens": 0.0}

    # ---- turns

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        self._sample(match.node.last_used)
        known = self._named.get((request.message.namespace, request.message.conversation))
        if known is None or request.admitted or request.stats.retractions:
            return
        branch = next((known.tips[node] for node, _ in path_to(match.node) if node in known.tips), known.latest)
        if branch.due_s is None and not known.closed:
            gap_s = max(0.0, request.arrived_s - branch.ended_s)
            known.gaps.add(gap_s)
            self._gaps[known.announces].add(gap_s)
        self._counts["conversation_turns"] += 1
        self._counts["conversation_hit_tokens"] += match.num_cached or len(match.pages) * self._page_size

    def free(self, request: Request) -> None:
        message, tip = request.message, request.lock
        if tip is None or tip.parent is None:
            return
        self._sample(tip.last_used)
        if not message.conversation or not request.ended:
            return
        turned = self._of(message.namespace, message.conversation)
        turned.at = tip.last_used
        left = turned.move(tip, ConversationBranch(self.now_s, within_s=message.returns_within_s or math.inf))
        self._own(turned, tip)
        self._expect(turned, message.expected_return_s, closed=False, left=left)

    def announce(self, namespace: Namespace, name: str, return_s: float | None) -> None:
        """Expect the next turn in `return_s`; None: it is over."""
        if (known := self._named.get((namespace, name))) is not None:
            self._expect(known, return_s, closed=return_s is None)

    def _expect(
        self, turned: KnownConversation, return_s: float | None, *, closed: bool, left: Sequence[Node] = ()
    ) -> None:
        turned.closed, turned.latest.due_s = closed, None if return_s is None else self.now_s + return_s
        turned.announces |= return_s is not None
        for node in (*left, *turned.tips):
            self.order.note(node)

    def _of(self, namespace: Namespace, name: str) -> KnownConversation:
        found = self._named.setdefault((namespace, name), KnownConversation())
        self._named.move_to_end((namespace, name))
        if len(self._named) > MAX_CONVERSATIONS:
            _, oldest = self._named.popitem(last=False)
            oldest.forgotten = True
        return found

    def _own(self, turned: KnownConversation, tip: Node) -> None:
        for node, _ in path_to(tip):
            owner = self._owners.get(node, turned)
            if owner is None or (owner is turned and node in self._owners):
                return  # so are those above
            self._owners[node] = turned if owner is turned else None

    # ---- the order

    def rank(self, node: Node) -> Rank:
        owner = self._owners.get(node)
        if owner is None or owner.forgotten or node.last_used > owner.at:
            return (node.last_used, 0)
        branch = owner.tips.get(node)
        if owner.closed or branch is None or branch.superseded:
            return SUPERSEDED
        last_use_s = self._last_use_s(owner, branch)
        clock = self._clocks[max(0, bisect_right(self._times, last_use_s) - 1)]
        return (clock, round(last_use_s * 1000))

    def _last_use_s(self, owner: KnownConversation, branch: ConversationBranch) -> float:
        if branch.due_s is not None:
            return min(branch.due_s, 2 * self.now_s - branch.due_s)
        gap_s = min(self._gaps[owner.announces].tail_s(owner.gaps), branch.within_s)
        return min(branch.ended_s, self.now_s - gap_s)

    def _sample(self, clock: int) -> None:
        if clock <= self._clocks[-1]:
            return
        if self.now_s > self._times[-1]:
            self._times.append(self.now_s)
            self._clocks.append(clock)
        else:
            self._clocks[-1] = clock
        if len(self._times) > MAX_SAMPLES:
            del self._times[1:MAX_SAMPLES:2], self._clocks[1:MAX_SAMPLES:2]

    # ---- events of the tree

    def on_split(self, upper: Node, lower: Node) -> None:
        if lower in self._owners:
            self._owners[upper] = self._owners[lower]

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        owner = self._owners.pop(node, None)
        if owner is None or node not in owner.tips:
            return
        branch, above = owner.tips.pop(node), node.parent
        if above is not None and self._owners.get(above) is owner:
            owner.tips.setdefault(above, branch)

    # ---- reports

    def counters(self) -> dict[str, float]:
        return self._counts

    def gauges(self) -> dict[str, float]:
        return {"conversations": float(len(self._named))}

    def check(self, requests: Sequence[Request]) -> None:
        known = set(self._named.values())
        for node, owner in self._owners.items():
            assert node.parent is not None, "a node of a conversation is not in the tree"
            assert owner is None or owner.forgotten or owner in known, "a node of an unknown conversation"
        for one in known:
            assert len(one.tips) <= MAX_TIPS
            owners = [self._owners.get(tip, one) for tip in one.tips]
            assert all(owner is None or owner is one for owner in owners), "a tip of another conversation"
        assert len(self._named) <= MAX_CONVERSATIONS and len(self._times) == len(self._clocks) <= MAX_SAMPLES


def path_to(node: Node) -> Sequence[tuple[Node, int]]:
    """Nodes from `node` up, with the pages up to their ends."""
    chain = list(node.up())
    ends = accumulate(len(one.pages) for one in reversed(chain))
    return list(zip(chain, reversed([*ends]), strict=True))
