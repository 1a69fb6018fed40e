"""Optional fields of a choice: token ids (vLLM, SGLang), last hidden state (SGLang). Pure."""

import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from engine.frontend.apis.shared.request import RequestFields
from engine.text.sample import TextOutput


class Extras:
    """In a stream, ids come with the next text, hidden states last."""

    def __init__(self, body: RequestFields, prompts: Sequence[list[int]]) -> None:
        self._token_ids = bool(body.return_token_ids)
        self._hidden_states = bool(body.return_hidden_states)
        self._prompts: dict[int, list[int]] = dict(enumerate(prompts))  # not shown yet
        self._new: defaultdict[int, list[int]] = defaultdict(list)  # tokens not shown yet
        self._last: dict[int, bytes] = {}

    def add(self, index: int, output: TextOutput) -> None:
        self._new[index] += output.tokens.new_ids
        if output.tokens.hidden:
            self._last[index] = output.tokens.hidden[-1]

    def take(self, index: int, *, finished: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._token_ids:
            shown["token_ids"] = self._new.pop(index, [])
            if index in self._prompts:
                shown["prompt_token_ids"] = self._prompts.pop(index)
        if self._hidden_states and finished:
            shown["hidden_states"] = array.array("f", self._last.pop(index, b"")).tolist()
        return shown
