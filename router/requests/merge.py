"""Merges prefill's part into decode's answer: input logprobs, hidden states, cached tokens. Pure.

Only for requests of input logprobs; others, and unknown shapes, pass unread.
"""

from typing import Any

import msgspec

from router.body import Api
from service.http.errors import decode_or_none

_INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_encode = msgspec.json.Encoder().encode


class Merger:
    def __init__(self, api: Api, prefill_body: bytes) -> None:
        self._api = api
        prefill = decode_or_none(prefill_body)
        self._prefill = _items(api, prefill)
        self._usage = _dict(prefill, "usage")
        self._seen: set[int] = set()
        self._shifts: dict[int, int] = {}  # by choice: shift of later text offsets

    def follow(self, prefill_body: bytes) -> None:
        """Take hidden states that another prefill worker recomputed."""
        for known, newer in zip(self._prefill, _items(self._api, decode_or_none(prefill_body)), strict=False):
            if states := _dict(newer, "meta_info").get("hidden_states"):
                _dict(known, "meta_info")["hidden_states"] = states

    def merge_answer(self, body: bytes) -> bytes:
        answer = decode_or_none(body)
        if answer is None:
            return body
        for index, item in enumerate(_items(self._api, answer)):
            self._merge_item(item.get("index", index) if self._api is Api.COMPLETIONS else index, item)
        self._merge_usage(answer)
        return _encode(answer)

    def merge_event(self, data: bytes) -> bytes:
        event = decode_or_none(data)
        if not isinstance(event, dict):
            return data
        for item in _items(self._api, event):
            index = item.get("index", 0)
            if isinstance(index, int):
                self._merge_item(index, item)
        self._merge_usage(event)
        return _encode(event)

    def merge_events(self, events: bytes) -> bytes:
        return b"".join(map(self._merge_line, events.splitlines(keepends=True)))

    def _merge_line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        data = line[5:].strip()
        return line if data == b"[DONE]" else b"data: " + self.merge_event(data) + b"\n"

    def _merge_item(self, index: int, item: dict[str, Any]) -> None:
        if not 0 <= index < len(self._prefill):
            return
        first = index not in self._seen
        self._seen.add(index)
        if self._api is Api.GENERATE:
            _merge_meta(_dict(self._prefill[index], "meta_info"), _dict(item, "meta_info"), first=first)
        elif first:
            known = self._prefill[index]
            self._shifts[index] = _merge_completion(known, item, num_outputs=self._num_outputs())
        elif shift := self._shifts[index]:
            _shift_offsets(_dict(item, "logprobs"), shift)

    def _num_outputs(self) -> int:
        total = self._usage.get("completion_tokens")
        return total // max(1, len(self._prefill)) if isinstance(total, int) else 1

    def _merge_usage(self, answer: object) -> None:
        cached = _dict(self._usage, "prompt_tokens_details").get("cached_tokens")
        usage = _dict(answer, "usage")
        if not cached or not usage:
            return
        details = usage.get("prompt_tokens_details") or {}
        if isinstance(details, dict) and not details.get("cached_tokens"):
            usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}


def _merge_meta(prefill: dict[str, Any], meta: dict[str, Any], *, first: bool) -> None:
    """Merge a native answer: logprobs into the first event, and later ones with the field."""
    for name in _INPUT_LOGPROBS:
        if prefill.get(name) and not meta.get(name) and (first or name in meta):
            meta[name] = prefill[name]
    if prefill.get("hidden_states") and "hidden_states" in meta:
        meta["hidden_states"] = prefill["hidden_states"] + meta["hidden_states"]
    if prefill.get("cached_tokens") and not meta.get("cached_tokens"):
        meta["cached_tokens"] = prefill["cached_tokens"]


def _merge_completion(prefill: dict[str, Any], choice: dict[str, Any], *, num_outputs: int) -> int:
    """Put the prompt's columns before decode's (echo); return the shift of offsets.

    Columns that begin with a null logprob have the prompt already.
    """
    known = _dict(prefill, "logprobs")
    columns = _dict(choice, "logprobs")
    own = columns.get("token_logprobs") or []
    num_known = len(known.get("token_logprobs") or [])
    num_prompt = max(0, num_known - num_outputs)
    if num_prompt == 0 or (own and own[0] is None):
        return 0
    shift = _offset_shift(known, columns, at=num_prompt)
    _shift_offsets(columns, shift)
    for name in _COLUMNS:
        prompt_part = (known.get(name) or [])[:num_prompt]
        own_part = columns.get(name) or []
        if prompt_part or own_part:
            columns[name] = prompt_part + own_part
    choice["logprobs"] = columns
    return shift


def _shift_offsets(columns: dict[str, Any], shift: int) -> None:
    if columns.get("text_offset"):
        columns["text_offset"] = [offset + shift for offset in columns["text_offset"]]


def _offset_shift(known: dict[str, Any], columns: dict[str, Any], *, at: int) -> int:
    """The shift of decode's offsets by the first output token, which both have."""
    theirs, own = known.get("text_offset") or [], columns.get("text_offset") or []
    return max(0, theirs[at] - own[0]) if len(theirs) > at and own else 0


def _items(api: Api, answer: object) -> list[dict[str, Any]]:
    if api is not Api.GENERATE:
        answer = answer.get("choices") if isinstance(answer, dict) else None
        return [c for c in answer if isinstance(c, dict)] if isinstance(answer, list) else []
    return [item for item in (answer if isinstance(answer, list) else [answer]) if isinstance(item, dict)]


def _dict(owner: object, name: str) -> dict[str, Any]:
    value = owner.get(name) if isinstance(owner, dict) else None
    return value if isinstance(value, dict) else {}
