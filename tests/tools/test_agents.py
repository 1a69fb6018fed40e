"""The trace of agents against the published figures that it is made of, and its cache under orders of eviction."""

import random
from collections import Counter
from itertools import count, pairwise
from statistics import mean, median

from benchmarks.goodput.agent_sessions import AgentSession, AgentTurn, agent_trace
from benchmarks.goodput.agents import Replay, Trace


def sessions(number: int) -> list[list[AgentTurn]]:
    fresh = count()
    return [AgentSession(i, 0.0, random.Random(i), fresh=fresh, names="own").turns() for i in range(number)]


def test_the_trace_has_the_published_figures() -> None:
    found = sessions(250)
    main = [[turn for turn in turns if turn.conversation == turn.session] for turns in found]
    assert 36 <= median(map(len, main)) <= 50, "AgentX: 43"
    assert 110 <= mean(map(len, main)) <= 180, "Weka: 144"
    assert 130_000 <= median(turn.input_len for turns in main for turn in turns) <= 154_000, "AgentX: 142 thousand"
    assert 420 <= median(turn.answer[1] for turns in main for turn in turns) <= 470, "AgentX: 444"
    assert 0.36 <= mean(len(turns) < len(all_of) for turns, all_of in zip(main, found, strict=True)) <= 0.52, (
        "AgentX: 44 %"
    )
    groups = mean(len({turn.conversation for turn in turns}) - 1 for turns in found)
    assert 3.4 <= groups <= 5.2, "Weka: 4.3 subagents"
    after = Counter(turn.after for turns in main for turn in turns)
    assert 0.86 <= after["tool"] / (after["tool"] + after["human"]) <= 0.92, "TraceLab: 0.89"
    tools = sorted(turn.gap_s for turns in main for turn in turns if turn.after == "tool")
    assert 0.25 <= median(tools) <= 0.36 and 11 <= tools[len(tools) * 9 // 10] <= 17, "TraceLab: 0.3 and 13.6 s"
    humans = sorted(turn.gap_s for turns in main for turn in turns if turn.after == "human")
    assert 70 <= median(humans) <= 100 and 900 <= humans[len(humans) * 9 // 10] <= 1700, "TraceLab: 84 and 1236 s"


def test_a_seed_is_a_trace() -> None:
    once, again, other = (agent_trace(seed=seed, sessions=5, hours=1.0) for seed in (1, 1, 2))
    assert once == again != other
    assert all(a.at_s <= b.at_s for a, b in pairwise(once))


def test_what_is_known_of_conversations_raises_the_hit_rate() -> None:
    trace = Trace(agent_trace(seed=3, sessions=20, hours=1.5), 5400.0)
    pages = int(0.6 * trace.needed)
    rates = {
        name: Replay(trace, name, pages=pages, seed=3).run() for name in ("LRU", "names + ends + returns", "oracle")
    }
    assert rates["LRU"] < rates["names + ends + returns"] <= rates["oracle"] + 0.002, rates
    assert rates["oracle"] - rates["names + ends + returns"] < 0.02, rates
