"""What a cluster in which little else goes wrong must bring about: runs of which more is demanded than of a seed.

A seed's run may end requests with a clear error. Here they succeed, and what is promised has happened: a run in which nothing moved proves nothing.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from service.http.reconnect import MAX_KEPT_BYTES
from tools.simulation.options import EngineBehaviour, Options, options_of
from tools.simulation.run import Outcome, run

TOO_LITTLE = "the run reaches too little"  # a breach by the run itself: it says nothing of the product


@dataclass(frozen=True, kw_only=True)
class Promise:
    """`reach`: least of what the run must inject or see to prove anything.

    `least` of what is promised, and what is `never` seen. `outcomes` that requests may have.
    """

    name: str
    options: Options
    least: Mapping[str, int]
    reach: Mapping[str, int] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    outcomes: frozenset[str] = frozenset(["ok"])
    most_gap_s: float = math.inf  # between two events of a stream

    def breach(self, outcome: Outcome) -> str:
        """Return how a run without a violation breaks it; "": it does not."""
        found = {**outcome.injected, **outcome.seen}
        if outcome.outcomes.keys() - self.outcomes:
            return f"requests end as {outcome.outcomes}"
        for what in self.never:
            if found.get(what, 0):
                return f"{what}: {found[what]}, and none is promised"
        if outcome.longest_gap_s > self.most_gap_s:
            return f"a client waits {outcome.longest_gap_s:.2f} s for its next event"
        for what, count in {**self.reach, **self.least}.items():
            if found.get(what, 0) < count:
                why = f"{TOO_LITTLE}: " if what in self.options.faults or what in self.reach else ""
                return f"{why}{what}: {found.get(what, 0)}, and at least {count} are promised"
        return ""


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


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


def _plain(seed: int, faults: Sequence[str], /, **more: Any) -> Options:
    """Four workers of each role, quick links, room for all, and steps that are slow beside them: faults strike answers."""
    options = calm(options_of(seed, nodes=8, faults=tuple(faults)))
    even = replace(options, num_prefill=4, num_decode=4, ranks=(1, 1), kv_units=1, stages=(1, 1))
    plain = replace(even, priorities=False, retry_max=5, most_kept_bytes=MAX_KEPT_BYTES)
    roomy = replace(plain, delay_s=(0.0001, 0.0005), pages=(300, 150), rows=16, clock_s=0.01)
    return replace(roomy, **more)


def _seeing(seed: int, faults: Sequence[str], /, **more: Any) -> Options:
    """Workers have room for few images at a time, and little for answers."""
    tight: dict[str, Any] = {"pages": (34, 24), "page_size": 2, "chunk": 8, "depth": (2, 2), "host_pages": 200}
    plain: dict[str, Any] = {"resume": "prefill", "layers": 1, "embeddings": False, "clock_s": 0.002}
    asked: dict[str, Any] = {"num_requests": 30, "burst": 10, "length_s": 3.0, "max_running": 12}
    return _plain(seed, faults, **{**tight, **plain, **asked, "fault_every_s": 0.25, **more})


def _encoding(seed: int, faults: Sequence[str], /, **more: Any) -> Options:
    """Encoder workers have pools for few images, prefill workers for as few that arrive, and little beside."""
    pools: dict[str, Any] = {"feature_page": 2, "feature_pages": (10, 15), "feature_rows": 4, "encode_room": 9}
    asked: dict[str, Any] = {"image_room": 9, "num_encode": 2, "pages": (60, 60), "length_s": 8.0}
    each: dict[str, Any] = {"num_prefill": 2, "num_decode": 2, "feature_timeout_s": 1.0}
    return _seeing(seed, faults, **{**pools, **asked, **each, **more})


def _drained(seed: int, faults: Sequence[str], /, **more: Any) -> Options:
    return replace(calm(options_of(seed, nodes=6, faults=tuple(faults))), **more)


_KINDS = {"plain": _plain, "seeing": _seeing, "encoding": _encoding, "drained": _drained}
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_ENGINES = {name: EngineBehaviour(**_tuples(row)) for name, row in _DATA.pop("engines").items()}


def _promise(name: str, row: dict[str, Any]) -> Promise:
    options = _tuples(row.get("options", {}))
    options |= {key: _ENGINES[options[key]] for key in ("engine", "encoder_engine") if key in options}
    return Promise(
        name=name,
        options=_KINDS[row["kind"]](row["seed"], row["faults"], **options),
        least=row.get("least", {}),
        reach=row.get("reach", {}),
        never=tuple(row.get("never", ())),
        outcomes=frozenset(row.get("outcomes", ["ok"])),
        most_gap_s=row.get("most_gap_s", math.inf),
    )


PROMISES = tuple(_promise(name, row) for name, row in _DATA.items())
OF_ENCODERS = tuple(promise for promise in PROMISES if promise.options.num_encode)
