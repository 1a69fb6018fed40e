"""What a cluster in which little else goes wrong must bring about: runs of which more is demanded than of a seed.

A seed's run may end requests with a clear error. Here they succeed, and what is promised has happened: a run in which nothing moved proves nothing.
"""

import math
import tomllib
from collections.abc import Mapping
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
    kept = replace(options, engine=engine, most_kept_bytes=MAX_KEPT_BYTES)
    return replace(kept, max_queued=100, max_concurrent=10_000, prealloc_timeout_s=60.0, deadlines=False)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_ENGINES = {name: EngineBehaviour(**_tuples(row)) for name, row in _DATA.pop("engines").items()}
_KINDS: dict[str, dict[str, Any]] = _DATA.pop("kinds")


def _kind(name: str) -> dict[str, Any]:
    """The options of a kind, over those of the kind that it is `like`."""
    row = _KINDS[name]
    return {**(_kind(row["like"]) if "like" in row else {}), **row}


def _promise(name: str, row: dict[str, Any]) -> Promise:
    options = _tuples({**_kind(row["kind"]), **row.get("options", {})})
    options |= {key: _ENGINES[options[key]] for key in ("engine", "encoder_engine") if key in options}
    options.pop("like", None)
    drawn = options_of(row["seed"], nodes=options.pop("nodes"), faults=tuple(row["faults"]))
    return Promise(
        name=name,
        options=replace(calm(drawn), **options),
        least=row.get("least", {}),
        reach=row.get("reach", {}),
        never=tuple(row.get("never", ())),
        outcomes=frozenset(row.get("outcomes", ["ok"])),
        most_gap_s=row.get("most_gap_s", math.inf),
    )


PROMISES = tuple(_promise(name, row) for name, row in _DATA.items())
OF_ENCODERS = tuple(promise for promise in PROMISES if promise.options.num_encode)
