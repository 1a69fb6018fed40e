"""Hit rates of agents' sessions in a prefix cache that is too small, by order of eviction: docs/reports/agents.md.

usage: python -m benchmarks.goodput.agents [--seeds N ...] [--sessions N] [--hours H] [--share S] [--report FILE]

Virtual time: traces are those of benchmarks/goodput/agent_sessions.py, and production code keeps the cache (engine/core). To the core a
token is UNIT tokens here, and a page one such. Each request takes the pages of its prompt when it starts, and those of
its answer when it ends. Cached tokens are counted over the prompts of the last 60 % of the time.
"""

import argparse
import heapq
import math
import platform
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, median

from benchmarks.goodput.agent_sessions import AgentSession, AgentTurn, Block, agent_trace
from engine.core.mem_cache.conversations import ConversationPages
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import EvictionOrder, Node, RadixCache, Rank
from engine.core.memory import Memory
from engine.core.request import Request
from engine.messages import FinishReason, GenerateRequest
from engine.sampling_params import SamplingParams

UNIT = 64
WARM_UP = 0.4  # share of the time
ERROR = 1.0  # standard deviation of the logarithm of announced returns
ENDED = FinishReason(kind="stop")
NEVER = -1e15
ORDERS = ("LRU", "names", "names + returns", "names + ends", "names + ends + returns", "oracle")
PAGE = """# Agents: which pages leave the prefix cache first

`{command}`, virtual time on {machine}, {day}, commit {commit}.

The trace has what is published of coding agents: turns, input and answer (median), and the share of sessions with
subagents of [AgentX](https://vllm.ai/blog/2026-09-08-vllm-agentx); mean turns and subagents per session of
[cc-traces-weka-062126](https://huggingface.co/datasets/semianalysisai/cc-traces-weka-062126); times of generation,
tools and humans, and the share of tool turns, of [TraceLab](https://arxiv.org/abs/2606.30560). `benchmarks/goodput/agent_sessions.py` names
what is our own guess: contexts at first and after compaction, sizes of tool results, edits, subagents' prompts.

| figure | published | here |
| --- | --- | --- |
{facts}

Memory: W is the least with which an oracle never misses a page that is used again: the most tokens, at any time, between
their first and last use. The caches below have {share:.0%} of it. The oracle evicts the leaf whose next use is furthest.

- *names*: requests name their conversation; *shared*: subagents have their parent's name. Returns then help less.
- *ends*: clients say when a conversation is over (`/close_session`).
- *returns*: they say when a tool or subagent will return (`/expect_return`): its true time, times e to the power of a
  normal error of {error:g}.

Share of prompt tokens that were cached:

{table}

{verdict}
"""


def units(block: Block) -> int:
    return max(1, block[1] // UNIT)


@dataclass
class Trace:
    turns: Sequence[AgentTurn]
    end_s: float
    uses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by block
    needed: int = 0  # W, in units

    def __post_init__(self) -> None:
        sizes, ends = dict[int, int](), dict[int, float]()
        for turn in self.turns:
            for block in turn.blocks:
                self.uses[block[0]].append(turn.at_s)
                sizes[block[0]], ends[block[0]] = units(block), max(turn.end_s, ends.get(block[0], 0.0))
        steps = [(times[0], sizes[block]) for block, times in self.uses.items()]
        steps += [(end_s, -sizes[block]) for block, end_s in ends.items()]
        level = 0
        for _, change in sorted(steps):
            level += change
            self.needed = max(self.needed, level)

    def next_use_s(self, block: int, now_s: float) -> float:
        times = self.uses.get(block, [])
        at = bisect_right(times, now_s)
        return times[at] if at < len(times) else math.inf


class Oracle(EvictionOrder):
    def __init__(self, trace: Trace) -> None:
        super().__init__(self.rank)
        self._trace, self.now_s = trace, 0.0

    def rank(self, node: Node) -> Rank:
        next_s = self._trace.next_use_s(node.key[0], self.now_s)
        return (round(max(NEVER, -next_s * 1e3)), 0)


class Replay:
    """The cache of one worker, under one order of eviction, with `pages` units of memory."""

    def __init__(self, trace: Trace, name: str, *, pages: int, seed: int) -> None:
        self._trace, self._name, self._rng = trace, name, random.Random(seed)
        self.allocator = PageAllocator(num_pages=pages, page_size=1)
        self.conversations, self.oracle = ConversationPages(page_size=1), Oracle(trace)
        order = {"LRU": None, "oracle": self.oracle}.get(name, self.conversations.order)
        parts = [] if name in ("LRU", "oracle") else [self.conversations]
        cache = RadixCache(self.allocator, order=order, parts=parts)
        self.memory = Memory(self.allocator, cache, parts)
        self._running: list[tuple[float, int, Request]] = []
        self._last = {turn.conversation: number for number, turn in enumerate(trace.turns)}
        self.prompt = self.cached = self.refused = 0

    def run(self) -> float:
        """The share of prompt tokens that were cached."""
        for number, turn in enumerate(self._trace.turns):
            while self._running and self._running[0][0] <= turn.at_s:
                self._finish(*heapq.heappop(self._running))
            self._at(turn.at_s)
            self._start(number, turn)
        return self.cached / self.prompt

    def _at(self, now_s: float) -> None:
        self.conversations.now_s = self.oracle.now_s = now_s

    def _start(self, number: int, turn: AgentTurn) -> None:
        ids = [token for block in turn.blocks for token in [block[0]] * units(block)]
        named = "" if self._name in ("LRU", "oracle") else turn.conversation
        message = GenerateRequest(str(number), ids, SamplingParams(max_new_tokens=1), conversation=named)
        request = Request(message=message, arrived_s=turn.at_s)
        counts = turn.at_s >= WARM_UP * self._trace.end_s
        self.prompt += counts * len(ids)
        if not self.memory.admit(request, reserved_pages=0):
            self.refused += 1
            return
        self.cached += counts * request.shared_pages
        request.admitted = True
        request.launched_len = request.computed_len = len(ids)
        self.memory.share(request)
        heapq.heappush(self._running, (turn.end_s, number, request))

    def _finish(self, end_s: float, number: int, request: Request) -> None:
        self._at(end_s)
        turn = self._trace.turns[number]
        answer = [turn.answer[0]] * units(turn.answer)
        if len(answer) <= self.memory.available:
            request.pages += self.memory.take(len(answer))
            request.output_ids += answer
            request.launched_len = request.computed_len = request.num_tokens
        request.finish = ENDED
        self.memory.give_back(request)
        if "ends" in self._name and turn.after == "" and self._last[turn.conversation] == number:
            self.conversations.announce((), turn.conversation, None)
        elif "returns" in self._name and turn.after in ("tool", "subagents"):
            return_s = turn.gap_s * self._rng.lognormvariate(0.0, ERROR)
            self.conversations.announce((), turn.conversation, return_s)


def rates_of(seed: int, args: argparse.Namespace, *, names: str) -> tuple[Trace, dict[str, float]]:
    """Of each order; "all" is the oracle with W."""
    turns = agent_trace(seed=seed, sessions=args.sessions, hours=args.hours, names=names)
    trace = Trace(turns, args.hours * 3600)
    found, refused = {"all": Replay(trace, "oracle", pages=trace.needed, seed=seed).run()}, 0
    for name in ORDERS:
        replay = Replay(trace, name, pages=int(args.share * trace.needed), seed=seed)
        found[name] = replay.run()
        refused += replay.refused
        replay.memory.cache.check()
        replay.conversations.check([])
    shown = {name: f"{rate:.2%}" for name, rate in found.items()}
    print(seed, names, len(turns), trace.needed * UNIT, shown, f"{refused} refused", flush=True)
    return trace, found


def facts() -> str:
    fresh, found = count(), list[list[AgentTurn]]()
    for number in range(400):
        session = AgentSession(number, 0.0, random.Random(number), fresh=fresh, names="own")
        found.append(session.turns())
    main = [[turn for turn in turns if turn.conversation == turn.session] for turns in found]
    gaps = {kind: sorted(t.gap_s for turns in main for t in turns if t.after == kind) for kind in ("tool", "human")}
    share = len(gaps["tool"]) / (len(gaps["tool"]) + len(gaps["human"]))
    rows = [
        ("turns of a session, median, mean", "43, 144", f"{median(map(len, main)):.0f}, {mean(map(len, main)):.0f}"),
        ("tokens in, median", "142,000", f"{median(t.input_len for turns in main for t in turns):,.0f}"),
        ("tokens out, median", "444", f"{median(t.answer[1] for turns in main for t in turns):.0f}"),
        ("sessions with subagents", "44 %", f"{mean(len(m) < len(t) for m, t in zip(main, found, strict=True)):.0%}"),
        (
            "subagents of a session, mean",
            "4.3",
            f"{mean(len({t.conversation for t in turns}) - 1 for turns in found):.1f}",
        ),
        ("turns after a tool, of those after a tool or human", "89 %", f"{share:.0%}"),
        *(
            (f"wait for a {kind}, p50, p90, s", published, f"{at[len(at) // 2]:.1f}, {at[len(at) * 9 // 10]:,.1f}")
            for (kind, at), published in zip(gaps.items(), ("0.3, 13.6", "84, 1,236"), strict=True)
        ),
    ]
    return "\n".join(f"| {name} | {published} | {here} |" for name, published, here in rows)


def page(args: argparse.Namespace, command: str) -> str:
    head = ["seed", "names", "turns", "W, M tokens", "oracle, all of W", *ORDERS]
    lines = [head, ["---"] * len(head)]
    worst: dict[str, list[float]] = {name: [] for name in ("same", "whole", "LRU")}
    for names, seeds in (("shared", args.seeds[: args.shared]), ("own", args.seeds)):
        for seed in seeds:
            trace, found = rates_of(seed, args, names=names)
            shown = [f"{100 * found[name]:.2f}" for name in ("all", *ORDERS)]
            lines.append([str(seed), names, f"{len(trace.turns):,}", f"{trace.needed * UNIT / 1e6:.2f}", *shown])
            if names == "shared":
                continue
            best = found["names + ends + returns"]
            worst["same"].append(found["oracle"] - best)
            worst["whole"].append(found["all"] - best)
            worst["LRU"].append(found["oracle"] - found["LRU"])
    spans = {name: f"{100 * min(gaps):.2f} to {100 * max(gaps):.2f}" for name, gaps in worst.items()}
    return PAGE.format(
        command=command,
        machine=f"{platform.processor() or platform.machine()}",
        day=time.strftime("%Y-%m-%d"),
        commit=subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        facts=facts(),
        share=args.share,
        error=ERROR,
        table="\n".join("| " + " | ".join(line) + " |" for line in lines),
        verdict=(
            f"With own names, ends and returns the hit rate is {spans['same']} points below the oracle with as much memory, and "
            f"{spans['whole']} below the oracle with all of W; LRU is {spans['LRU']} below the first."
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="hit rates of agents' sessions by order of eviction")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--shared", type=int, default=3, help="seeds of which subagents also have their parent's name")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--share", type=float, default=0.6, help="of W")
    parser.add_argument("--report", type=Path, default=Path("docs/reports/agents.md"))
    args = parser.parse_args()
    command = "python -m benchmarks.goodput.agents"
    args.report.write_text(page(args, " ".join([command, *sys.argv[1:]])))


if __name__ == "__main__":
    main()
