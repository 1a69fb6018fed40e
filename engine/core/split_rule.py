"""From how many rows on ranks compute a step in two halves (engine/core/two_batches.py)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Of decode steps, and of steps with parts of prompts. 0: never."""

    decodes_from: int = 0
    prompts_from: int = 0

    def splits(self, rows: int, *, extend: bool) -> bool:
        least = self.prompts_from if extend else self.decodes_from
        return 0 < least <= rows


NEVER = SplitRule()
