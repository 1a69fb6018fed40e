"""The executor with checkable KV: each slot holds the hash of the token prefix that ends there, every read verifies all.

A step is computed at some moment between its launch and its collection, in stream order, as a device would. So writes
of peers fall before, between and after steps.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.plan import Plan, StepResult
from tests.core.hash_model import HashModel, Slot, step_hash
from tests.simulation.world import Violation

NOTHING = Slot(-1, -1)  # never written


class CheckedModel(HashModel):
    """Knows by itself what each slot's KV must be, from the tokens that the plans name."""

    def __init__(self, *, page_size: int, name: str) -> None:
        super().__init__(page_size=page_size)
        self.name = name
        self.num_checked = 0
        self._expected: dict[int, list[int]] = {}  # slot -> hash at each position

    def run(self, plan: Plan) -> StepResult:
        for opened in plan.opens:
            hashes: list[int] = []
            for token in [*opened.prompt_ids, *opened.output_ids]:
                hashes.append(step_hash(hashes[-1] if hashes else 0, token))
            self._expected[opened.slot] = hashes
        result = super().run(plan)
        for item, drawn in zip(plan.items, result.items, strict=True):
            if drawn.token is not None:
                hashes = self._expected[item.slot]
                hashes.append(step_hash(hashes[item.kv_len - 1], drawn.token))
        return result

    def read(self, row: list[int], end: int, *, adapter: int = 0) -> int:
        slot = next((slot for slot, mine in self.rows.items() if mine is row), None)
        if slot is None:  # no request's: the cache's, looked at
            return super().read(row, end, adapter=adapter)
        expected, size = self._expected[slot], self.page_size
        for position in range(end):
            found = self.kv.get((row[position // size], position % size), NOTHING).value
            if found != expected[position]:
                raise Violation(
                    f"{self.name} reads wrong KV: slot {slot}, position {position} of {end}, page {row[position // size]}"
                    f" holds {found}, must hold {expected[position]}"
                )
        self.num_checked += end
        return expected[end - 1] if end else 0

    def forget(self) -> None:
        """Whatever is cached belongs to other weights."""
        self.kv.clear()
        for key, pages in self.copies.items():
            self.copies[key] = [[None] * self.page_size for _ in pages]

    def damage(self, page: int, offset: int) -> None:
        """A bit flips."""
        slot = self.kv[page, offset]
        self.kv[page, offset] = Slot(slot.value ^ 1, slot.token)

    def checksum(self, pages: Sequence[int]) -> int:
        """As engine/executor/page_checksum.py: of what lies in `pages`, in their order; signed, 64 bits."""
        found = hashlib.blake2b(digest_size=8)
        for page in pages:
            for offset in range(self.page_size):
                slot = self.kv.get((page, offset), NOTHING)
                found.update(b"%d,%d;" % (slot.value, slot.token))
        return int.from_bytes(found.digest(), "little", signed=True)


@dataclass(eq=False)
class SimLaunch:
    plan: Plan
    result: StepResult | None = None


class SimExecutor:
    """In place of engine/executor/executor.py. `compute_some` is called by the worker at moments it draws."""

    def __init__(self, model: CheckedModel) -> None:
        self.model = model
        self._launched: deque[SimLaunch] = deque()

    def launch(self, plan: Plan) -> SimLaunch:
        launch = SimLaunch(plan)
        self._launched.append(launch)
        return launch

    def launch_forward(self, plan: Plan) -> SimLaunch:
        return self.launch(plan)

    def launch_draw(self, launch: SimLaunch) -> None:
        """The hash model draws with its forward: no grammar is used here."""

    def compute_one(self) -> None:
        """The oldest step that has not been computed yet."""
        if self._launched:
            launch = self._launched.popleft()
            launch.result = self.model.run(launch.plan)

    def collect(self, launch: SimLaunch) -> StepResult:
        while launch.result is None:
            self.compute_one()
        return launch.result
