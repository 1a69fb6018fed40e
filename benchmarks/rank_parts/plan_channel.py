"""What a step costs a leader on its way to a follower, between real processes."""

import argparse
import subprocess
import sys
import time
from contextlib import closing, suppress
from statistics import median
from typing import Any

import msgspec

from deploy.bench.report import table
from engine.core.plan import Plan, PlanItem
from engine.ranks.channel import Channel, follower_end, leader_end
from engine.ranks.messages import Done, Step, ToLeader, plan_of, step_of
from service.process.message_stream import ChannelClosed, socket_pair
from service.process.start import die_with_parent

TITLE = "The plan of a step"
TEXT = (
    "A leader sends every plan to its followers once, as a view of what a forward needs (engine/ranks/messages.py). `leader`: until the"
    " message is on its way, which is all that a step waits for; `there and back`: until a follower has read it, made a plan of it and"
    " answered. Messages are of one follower, over a socket pair."
)

DECODES = (1, 8, 64, 256)
PROMPT_TOKENS = 8192
TIMES = 200  # of a round
WARM_UP = 20


def measure(*, rounds: int) -> list[dict[str, Any]]:
    own, theirs = socket_pair()
    with theirs, closing(leader_end(own)) as leader:
        command = [sys.executable, "-m", __name__, "--descriptor", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent())
        rows = [_step(leader, name, plan, rounds) for name, plan in _plans().items()]
    process.wait()
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    return table(
        ["step", "bytes", "leader p50, us", "p99", "there and back p50, us", "p99"],
        [
            [
                row["step"],
                f"{row['bytes']}",
                f"{row['leader_p50_us']:.1f}",
                f"{row['leader_p99_us']:.0f}",
                f"{row['back_p50_us']:.0f}",
                f"{row['back_p99_us']:.0f}",
            ]
            for row in rows
        ],
    )


def _step(leader: Channel[ToLeader], name: str, plan: Plan, rounds: int) -> dict[str, Any]:
    """Each is answered, so that none waits behind another."""
    leader_s, back_s = [], []
    for n in range(rounds * TIMES + WARM_UP):
        before_s = time.perf_counter()
        leader.send(step_of(plan, answer=1))
        sent_s = time.perf_counter()
        leader.receive()
        if n >= WARM_UP:
            leader_s.append(sent_s - before_s)
            back_s.append(time.perf_counter() - before_s)
    return {
        "step": name,
        "bytes": len(msgspec.msgpack.encode(step_of(plan))),
        **_percentiles("leader", leader_s),
        **_percentiles("back", back_s),
    }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    return {
        f"{name}_p50_us": median(seconds) * 1e6,
        f"{name}_p99_us": sorted(seconds)[int(len(seconds) * 0.99)] * 1e6,
    }


def _plans() -> dict[str, Plan]:
    """Decodes far into their answers, one in sixteen of which gets a page; and a prompt."""
    decodes = {
        f"{size} decodes": Plan(seq=10_000, extend=False, items=[_decode(slot) for slot in range(size)])
        for size in DECODES
    }
    prompt = _item(0, list(range(PROMPT_TOKENS)), 0, new_pages=list(range(PROMPT_TOKENS // 16)), extend=True)
    return {**decodes, f"prompt of {PROMPT_TOKENS} tokens": Plan(seq=10_000, extend=True, items=[prompt])}


def _decode(slot: int) -> PlanItem:
    return _item(slot, [-(slot + 1)], 3000 + slot, new_pages=[] if slot % 16 else [40_000 + slot], extend=False)


def _item(slot: int, tokens: list[int], start: int, *, new_pages: list[int], extend: bool) -> PlanItem:
    return PlanItem(
        rid="0123456789abcdef",
        slot=slot,
        tokens=tokens,
        start=start,
        page_start=start // 16,
        new_pages=new_pages,
        sample=True,
        output_len=10,
        extend=extend,
    )


def main() -> None:
    """The follower."""
    parser = argparse.ArgumentParser(description="One follower of benchmarks.ranks' plans")
    parser.add_argument("--descriptor", type=int, required=True)
    channel = follower_end(parser.parse_args().descriptor)
    with suppress(ChannelClosed):
        while True:
            step = channel.receive()
            assert isinstance(step, Step)
            plan_of(step)
            channel.send(Done(step.answer))


if __name__ == "__main__":
    main()
