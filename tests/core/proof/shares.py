"""How many of a kind's fixed stories are played: in `make test` the first third or half, in `make slow-tests` all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

STEPS = 10_000


@dataclass(frozen=True)
class Share:
    """One of `parts` equal parts of the stories. What all stories must show it must show one of `shown` parts of: what is rare is not
    spread evenly."""

    parts: int
    shown: int

    def of(self, whole: int) -> int:
        """At least this part of `whole` stories."""
        return -(-whole // self.parts)

    def must_show(self, seen: Mapping[str, int], least: Mapping[str, int]) -> None:
        """Raise AssertionError where the stories prove little: too few steps, or too little of what `least` names."""
        wanted = {"steps": STEPS, **least}
        lacking = {name for name, whole in wanted.items() if seen[name] < whole // self.shown}
        assert not lacking, f"the stories do not show enough of {lacking}: {dict(seen)}"


def _shares(quick: Share, name: str) -> pytest.MarkDecorator:
    every = pytest.param(Share(parts=1, shown=1), id="all", marks=pytest.mark.slow)
    return pytest.mark.parametrize("share", [pytest.param(quick, id=name), every])


shares = _shares(Share(parts=3, shown=8), "third")
halves = _shares(Share(parts=2, shown=5), "half")
