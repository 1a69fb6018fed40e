"""A trace of agents' sessions from published distributions, of one seed. Pure.

A session has a trunk, which its harness shares, and turns: an answer and what follows it.

AgentX    vLLM's post on SemiAnalysis AgentX, vllm.ai/blog/2026-09-08-vllm-agentx
Weka      huggingface.co/datasets/semianalysisai/cc-traces-weka-062126
TraceLab  arXiv:2606.30560, github.com/uw-syfi/TraceLab
(own)     no published figure
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from planner.workload import FIRST_BLOCK, FIRST_OWN, PlannedRequest

# medians and standard deviations of logarithms
SESSION, LONGEST = (43, 1.5), 1500  # AgentX: median; Weka: mean 144
SUBAGENT = (11, 1.0)  # Weka: mean 24.8
ANSWER = (444, 0.57)  # AgentX: median; TraceLab: mean 523
TASK, SUBAGENT_TASK = (12_000, 0.8), (3000, 0.5)  # (own)
RESULT = (1500, 1.3)  # (own), so that the median input is AgentX's 142 thousand
SUMMARY = (40_000, 0.3)  # (own)
WINDOW = 256_000  # Weka's "-256k"
TRUNK, SUBAGENT_TRUNK, HARNESSES = 17_000, 8000, 4  # Weka: tools and system prompt; (own)
TOOL_SHARE = 0.89  # TraceLab: 73.6 steps after a tool, 8.9 after a user
TOOL_S = ((0.0, 0.02), (0.5, 0.3), (0.9, 13.6), (0.99, 240.0), (1.0, 600.0))  # TraceLab; 0.99 (own)
HUMAN_S = ((0.0, 3.0), (0.5, 84.0), (0.9, 1236.0), (0.99, 50_040.0), (1.0, 250_000.0))  # TraceLab
ANSWER_S = ((0.0, 0.8), (0.5, 5.7), (0.9, 22.2), (1.0, 120.0))  # TraceLab: generation
WITH_SUBAGENTS = 0.58  # of which AgentX's 44 % have some
SPAWNS = 0.03  # per turn of such a session; Weka: 4.3 groups a session
EDITS = 0.05  # share of human turns that replace the last turn (own)

Block = tuple[int, int]  # token id, count
Spread = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """A request whose answer ends at `end_s`. `after`: "tool", "human", "subagents" or "" (its end).

    `gap_s`: from the answer to the conversation's next turn.
    """

    at_s: float
    end_s: float
    session: str
    conversation: str
    blocks: tuple[Block, ...]
    answer: Block
    after: str = ""
    gap_s: float = math.inf

    @property
    def input_len(self) -> int:
        return sum(size for _, size in self.blocks)

    def planned(self) -> PlannedRequest:
        return PlannedRequest(at=self.at_s, blocks=self.blocks, output_len=self.answer[1])


@dataclass(slots=True)
class _Branch:
    """A growing context."""

    conversation: str
    trunk: tuple[Block, ...]
    blocks: list[Block] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(size for _, size in self.blocks) + sum(size for _, size in self.trunk)


class AgentSession:
    """`names` of subagents: their "own", or the session's ("shared")."""

    def __init__(self, number: int, at_s: float, rng: random.Random, *, fresh: "count[int]", names: str) -> None:
        self._rng, self._fresh, self._own_names = rng, fresh, names == "own"
        self._name, self._start_s = f"s{number}", at_s
        self._spawns = SPAWNS if rng.random() < WITH_SUBAGENTS else 0.0
        self._harness = rng.randrange(HARNESSES)

    def turns(self) -> list[AgentTurn]:
        rng, at_s, found = self._rng, self._start_s, list[AgentTurn]()
        branch = _Branch(self._name, ((FIRST_BLOCK + self._harness, TRUNK),))
        branch.blocks.append(self._block(TASK))
        left = min(LONGEST, _lognormal(rng, SESSION))
        while left > 0:
            left -= 1
            answer = self._block(ANSWER)
            end_s = at_s + _quantile(rng, ANSWER_S)
            spawned, after = list[AgentTurn](), "human"
            if rng.random() < self._spawns:
                after, spawned = "subagents", self._subagents(branch, answer, end_s)
                gap_s = max(turn.end_s for turn in spawned) - end_s
            elif rng.random() < TOOL_SHARE:
                after, gap_s = "tool", _quantile(rng, TOOL_S)
            else:
                gap_s = _quantile(rng, HUMAN_S)
            if not left:
                after, gap_s = "", math.inf
            found.append(self._turn(branch, at_s, end_s, answer, after, gap_s))
            found += spawned
            at_s = end_s + gap_s
            self._grow(branch, answer, edits=after == "human" and rng.random() < EDITS)
        return found

    def _grow(self, branch: _Branch, answer: Block, *, edits: bool) -> None:
        if edits and len(branch.blocks) > 1:
            branch.blocks[-1] = self._block(RESULT)  # another message in place of the last
            return
        branch.blocks += [answer, self._block(RESULT)]
        if branch.length > WINDOW:
            branch.blocks = [self._block(SUMMARY)]

    def _subagents(self, parent: _Branch, answer: Block, at_s: float) -> list[AgentTurn]:
        """One or several at once; the parent waits for all."""
        found = list[AgentTurn]()
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            name = f"{self._name}/{next(self._fresh)}" if self._own_names else self._name
            trunk = ((FIRST_BLOCK + HARNESSES + self._harness, SUBAGENT_TRUNK),)
            branch = _Branch(name, trunk, [self._block(SUBAGENT_TASK)])
            found += self._loop(branch, at_s + self._rng.random())
        return found

    def _loop(self, branch: _Branch, at_s: float) -> list[AgentTurn]:
        rng, found = self._rng, list[AgentTurn]()
        left = min(LONGEST, _lognormal(rng, SUBAGENT))
        while left > 0:
            left -= 1
            answer, end_s, gap_s = self._block(ANSWER), at_s + _quantile(rng, ANSWER_S), math.inf
            if left:
                gap_s = _quantile(rng, TOOL_S)
            found.append(self._turn(branch, at_s, end_s, answer, "tool" if left else "", gap_s))
            at_s = end_s + gap_s
            self._grow(branch, answer, edits=False)
        return found

    def _turn(self, branch: _Branch, at_s: float, end_s: float, answer: Block, after: str, gap_s: float) -> AgentTurn:
        return AgentTurn(
            at_s=at_s,
            end_s=end_s,
            session=self._name,
            conversation=branch.conversation,
            blocks=(*branch.trunk, *branch.blocks),
            answer=answer,
            after=after,
            gap_s=gap_s,
        )

    def _block(self, tokens: Spread) -> Block:
        return FIRST_OWN + next(self._fresh), _lognormal(self._rng, tokens)


def agent_trace(*, seed: int, sessions: int, hours: float, names: str = "own") -> list[AgentTurn]:
    """Turns of sessions that begin within `hours`, in order of time, up to then."""
    rng, fresh, found = random.Random(seed), count(), list[AgentTurn]()
    for number in range(sessions):
        at_s = rng.uniform(0.0, hours * 3600)
        found += AgentSession(number, at_s, random.Random(rng.random()), fresh=fresh, names=names).turns()
    return sorted((turn for turn in found if turn.at_s < hours * 3600), key=lambda turn: turn.at_s)


def _lognormal(rng: random.Random, of: Spread) -> int:
    return max(1, round(rng.lognormvariate(math.log(of[0]), of[1])))


def _quantile(rng: random.Random, points: Sequence[tuple[float, float]]) -> float:
    """A sample; its logarithm is linear between (share, seconds) points."""
    share = rng.random()
    at = min(len(points) - 1, bisect_right([point[0] for point in points], share))
    (low, first), (high, last) = points[at - 1], points[at]
    return first * math.pow(last / first, (share - low) / (high - low))
