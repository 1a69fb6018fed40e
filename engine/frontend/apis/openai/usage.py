"""Token counts of one OpenAI request while its samples grow. Pure."""

from typing import Any

from engine.text.sample import TextOutput


class Usage:
    """`num_prompt_tokens`: of each prompt. Samples are prompt-major, `n` for each; a prompt counts once."""

    def __init__(self, num_prompt_tokens: list[int], *, n: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._completion = [0] * (len(num_prompt_tokens) * n)
        self._cached = [0] * len(num_prompt_tokens)

    def add(self, index: int, output: TextOutput) -> None:
        self._completion[index] += len(output.tokens.new_ids)
        if index % self._n == 0:  # later samples of a prompt find the first one's pages: that saves the user nothing
            prompt = index // self._n
            self._cached[prompt] = max(self._cached[prompt], output.tokens.cached_tokens)

    def of_sample(self, index: int) -> dict[str, Any]:
        prompt = index // self._n
        return _usage(self._num_prompt_tokens[prompt], self._completion[index], self._cached[prompt])

    def total(self) -> dict[str, Any]:
        return _usage(sum(self._num_prompt_tokens), sum(self._completion), sum(self._cached))


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
