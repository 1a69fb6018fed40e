"""Token usage of a request. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.text.reasoning import ReasoningTokens
from engine.text.sample import TextOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts. `reasoning`: part of `completion`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


class Usage:
    """Samples are prompt-major, `n` each; a prompt counts once.

    `count_reasoning`: makes a sample's counter.
    """

    def __init__(
        self,
        num_prompt_tokens: list[int],
        *,
        n: int,
        count_reasoning: Callable[[], ReasoningTokens] | None = None,
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._completion = [0] * (len(num_prompt_tokens) * n)
        self._cached = [0] * len(num_prompt_tokens)
        self._reasoning = [count_reasoning() for _ in self._completion] if count_reasoning is not None else []

    def add(self, index: int, output: TextOutput) -> None:
        self._completion[index] += len(output.tokens.new_ids)
        if self._reasoning:
            self._reasoning[index].add(output.tokens.new_ids)
        if index % self._n == 0:  # later samples hit the first one's pages, which saves the user nothing
            prompt = index // self._n
            self._cached[prompt] = max(self._cached[prompt], output.tokens.cached_tokens)

    def of_sample(self, index: int) -> Counts:
        prompt = index // self._n
        return Counts(
            prompt=self._num_prompt_tokens[prompt],
            completion=self._completion[index],
            cached=self._cached[prompt],
            reasoning=self._reasoning[index].num if self._reasoning else 0,
        )

    def total(self) -> Counts:
        return Counts(
            prompt=sum(self._num_prompt_tokens),
            completion=sum(self._completion),
            cached=sum(self._cached),
            reasoning=sum(counter.num for counter in self._reasoning),
        )
