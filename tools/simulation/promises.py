"""What a cluster in which little else goes wrong must bring about: runs of which more is demanded than of a seed.

A seed's run may end requests with a clear error. Here they succeed, and what is promised has happened: a run in which nothing moved proves nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.http.reconnect import MOST_KEPT_BYTES
from tools.simulation.options import MOVE_FAULT, RETURN_FAULT, Options, options_of
from tools.simulation.run import Outcome, run
from tools.simulation.transfer_engine import EngineBehaviour

SUCCESS = frozenset(["ok"])


@dataclass(frozen=True, kw_only=True)
class Promise:
    """`least` of what is injected or seen, and what is `never` seen. `outcomes` that requests may have."""

    name: str
    options: Options
    least: Mapping[str, int]
    never: tuple[str, ...] = ()
    outcomes: frozenset[str] = SUCCESS
    most_gap_s: float = math.inf  # between two events of a stream

    def breach(self, outcome: Outcome) -> str:
        """Return how a run without a violation breaks it; "": it does not."""
        found = {**outcome.injected, **outcome.seen}
        if outcome.outcomes.keys() - self.outcomes:
            return f"requests end as {outcome.outcomes}"
        for what, count in self.least.items():
            if found.get(what, 0) < count:
                return f"{what}: {found.get(what, 0)}, and at least {count} are promised"
        for what in self.never:
            if found.get(what, 0):
                return f"{what}: {found[what]}, and none is promised"
        if outcome.longest_gap_s > self.most_gap_s:
            return f"a client waits {outcome.longest_gap_s:.2f} s for its next event"
        return ""


def play(promise: Promise) -> Outcome:
    outcome = run(promise.options)
    if outcome.ok and (breach := promise.breach(outcome)):
        outcome.problem = f"broken promise: {promise.name}: {breach}"
    return outcome


def calm(options: Options) -> Options:
    """Nothing goes wrong by itself, and nobody is refused for load."""
    engine = options_of(options.seed, faults=()).engine
    roomy = replace(options, engine=engine, max_queued=100, max_concurrent=10_000, prealloc_timeout_s=60.0)
    return replace(roomy, deadlines=False)


def _of(seed: int, *faults: str, fault_every_s: float, **more: Any) -> Options:
    """Four workers of each role, quick links, room for all, and steps that are slow beside them: faults strike answers."""
    options = calm(options_of(seed, nodes=8, faults=faults))
    even = replace(options, num_prefill=4, num_decode=4, ranks=(1, 1), kv_units=1, stages=(1, 1))
    plain = replace(even, priorities=False, retry_max=5, most_kept_bytes=MOST_KEPT_BYTES)
    roomy = replace(plain, delay_s=(0.0001, 0.0005), pages=(300, 150), rows=16, clock_s=0.01)
    return replace(roomy, fault_every_s=fault_every_s, **more)


def _seeing(seed: int, *faults: str, image_room: int, num_each: int, **more: Any) -> Options:
    """`num_each`: workers of each role, with room for few images at a time, and little for answers."""
    tight: dict[str, Any] = {"pages": (34, 24), "page_size": 2, "chunk": 8, "depth": (2, 2), "host_pages": 200}
    plain: dict[str, Any] = {"resume": "prefill", "layers": 1, "embeddings": False, "clock_s": 0.002}
    asked: dict[str, Any] = {
        "num_requests": 30,
        "burst": 10,
        "length_s": 3.0,
        "max_running": 12,
        "image_room": image_room,
    }
    more = {**tight, **plain, **asked, "num_prefill": num_each, "num_decode": num_each, **more}
    return _of(seed, *faults, fault_every_s=0.25, **more)


def _encoding(seed: int, *faults: str, **more: Any) -> Options:
    """Encoder workers have pools for few images, prefill workers for as few that arrive, and little beside."""
    pools: dict[str, Any] = {"feature_page": 2, "feature_pages": (10, 15), "feature_rows": 4, "encode_room": 9}
    asked: dict[str, Any] = {"image_room": 9, "num_each": 2, "num_encode": 2, "pages": (60, 60), "length_s": 8.0}
    return _seeing(seed, *faults, **{**pools, **asked, "feature_timeout_s": 1.0, **more})


def _drained() -> Options:
    """With these times no two workers of a role drain at once."""
    options = calm(options_of(11, nodes=6, faults=("drain prefill", "drain decode")))
    return replace(options, seed=18, ranks=(1, 1), kv_units=1, drain_timeout_s=20.0, retry_max=5, fault_every_s=1.5)


_FAULTY = EngineBehaviour(
    copy_s=(0.001, 0.004),
    slow_rate=0.06,
    slow_s=1.0,
    fail_rate=0.15,
    late_done_rate=0.1,
    late_rate=0.9,
    max_linger_s=2.0,
    connect_fail_rate=0.0,
    fence_fail_rate=0.0,
    fence_s=0.1,
    settle_s=0.5,
    gives_up_s=1.0,
    flip_rate=0.08,
)
_SLOW = replace(
    _FAULTY, copy_s=(0.01, 0.03), slow_rate=0.0, fail_rate=0.0, late_done_rate=0.0, late_rate=0.0, flip_rate=0.0
)
OF_ENCODERS = (
    Promise(
        name="encoder workers compute images for prefill workers, each once for all that ask at a time",
        options=_encoding(
            3, "memory pressure", "client disconnect", encoder_engine=_SLOW, feature_pages=(10, 8), length_s=5.0
        ),
        least={"features fetched": 20, "images that encoders have": 5, "features evicted": 10, "client disconnect": 2},
        never=("feature fetches late", "feature fetches refused"),
        outcomes=frozenset(["ok", "left"]),
    ),
    Promise(
        name="encoder workers that die, drain, freeze, are cut off or have other weights cost requests nothing but time",
        options=_encoding(2, "kill encode", "drain encode", "freeze encode", "cut encode", "memory pressure"),
        least={
            "kill encode, fast restart": 1,
            "kill encode, slow restart": 1,
            "drain encode": 1,
            "freeze encode": 1,
            "cut encode": 1,
            "features fetched": 5,
            "feature fetches refused": 2,
        },
    ),
    Promise(
        name="slow, failed, damaged and late writes of features are seen in no answer",
        options=_encoding(
            7,
            "memory pressure",
            length_s=6.0,
            encoder_engine=_FAULTY,
            checksum=True,
            transfer_retries=0,
            num_encode=3,
            feature_timeout_s=0.5,
        ),
        least={
            "transfer error": 3,
            "write after the failure": 2,
            "slow transfer": 1,
            "late writes": 2,
            "damaged pages found": 1,
            "features fetched": 3,
        },
    ),
    Promise(
        name="no features outlive their weights at either end",
        options=_encoding(2, "update weights", "memory pressure"),
        least={"weights taken": 5, "features fetched": 15, "feature fetches refused": 3},
        outcomes=frozenset(["ok", "error"]),  # an update may end what runs
    ),
)

PROMISES = (
    Promise(
        name="running requests move with their KV",
        options=_of(2, MOVE_FAULT, fault_every_s=0.2, clock_s=0.002),
        least={"migrate": 15, "moves landed": 20},
        never=("moves that failed", "failovers went_on", "failovers ended"),
    ),
    Promise(
        name="answers of decode workers that die go on at others, and again if these die",
        options=_of(1, "kill decode", fault_every_s=0.8, length_s=12.0),
        least={"failovers went_on": 5, "answers that go on twice": 1},
        never=("failovers ended",),
    ),
    Promise(
        name="answers of workers that freeze go on, whatever these say when they thaw",
        options=_of(4, "freeze", fault_every_s=0.5, length_s=12.0),
        least={"freeze decode": 5, "failovers went_on": 3},
        never=("failovers ended",),
        most_gap_s=3.0,
    ),
    Promise(
        name="nothing is left of answers that move or go on when their clients are gone",
        options=_of(4, "kill decode", MOVE_FAULT, "client disconnect", fault_every_s=0.5, length_s=12.0),
        least={"client disconnect": 2, "failovers moved": 10, "failovers went_on": 5},
        never=("failovers ended",),
        outcomes=frozenset(["ok", "left"]),
        most_gap_s=3.0,
    ),
    Promise(
        name="a state that a failed step has spoilt moves nowhere",
        options=_of(
            5,
            MOVE_FAULT,
            fault_every_s=0.1,
            clock_s=0.002,
            step_fail_rate=0.03,
            state_slots=(16, 10),
            length_s=3.0,
            chunk=8,
        ),
        least={"failed step": 20, "migrate": 10, "moves landed": 8},
        outcomes=frozenset(["ok", "error"]),  # one that fails three times ends
    ),
    Promise(
        name="workers that drain one by one lose nothing",
        options=_drained(),
        least={"drain prefill": 1, "drain decode": 1, "moves landed": 3},
    ),
    Promise(
        name="images go along with what is retracted, goes on elsewhere or comes from the host",
        options=_seeing(
            2,
            MOVE_FAULT,
            "memory pressure",
            "update weights",
            "kill decode",
            image_room=20,
            num_each=2,
            ranks=(1, 2),
            kv_units=2,
            prefix_fetch=True,
        ),
        least={
            "recomputes with images": 1,
            "features evicted": 10,
            "features found again": 20,
            "pages from the host tier": 50,
            "failovers went_on": 3,
        },
    ),
    Promise(
        name="no features outlive their weights",
        options=_seeing(2, "update weights", image_room=60, num_each=1),
        least={"weights taken": 5, "features found again": 8},
    ),
    *OF_ENCODERS,
    Promise(
        name="streams go on with clients that come again, at whichever router",
        options=_of(1, RETURN_FAULT, "kill router", fault_every_s=0.3, num_routers=2, resume_window_s=3.0),
        least={"kill router, fast restart": 1, "clients that came again": 8, "answers to a second return": 1},
        never=("streams that did not go on",),
        outcomes=frozenset(["ok", "error"]),  # of those of which nothing had come
    ),
)
