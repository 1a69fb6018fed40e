"""Requests of a file: ShareGPT's conversations, or JSON lines with a column `prompt`, `messages` or
`conversations`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench.config import CHAT, CUSTOM, BenchConfig
from deploy.bench.tokens import TokenCounter
from deploy.bench.workload import BenchRequest
from service.flags import ConfigError

MIN_TOKENS = 4  # of a ShareGPT prompt and answer; shorter ones are left out, as vLLM does
DIALOGUES = ("conversations", "conversation")
PROMPTS = ("prompt", "messages", *DIALOGUES)
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
LENGTHS = ("output_tokens", "output_len", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """`answer`: as recorded. `output_len`: a column of the file."""

    prompt: str | tuple[int, ...] = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    output_len: int | None = None


class _Unusable(ValueError):
    """A row without a request; the text completes the error."""


def read_requests(config: BenchConfig, tokens: TokenCounter) -> list[BenchRequest]:
    """At most --num-requests, each row once. Raises ConfigError."""
    assert config.dataset_path is not None, "checked"
    option = f"--dataset-path {config.dataset_path}"
    rows = _read(option, Path(config.dataset_path))
    if not config.disable_shuffle:
        random.Random(config.seed).shuffle(rows)
    requests: list[BenchRequest] = []
    for where, fields in rows:
        try:
            row = _custom(fields) if config.dataset_name == CUSTOM else _sharegpt(fields)
            request = None if row is None else _request(row, config, tokens, idx=len(requests))
        except _Unusable as error:
            raise ConfigError(f"{option}, {where}: {error}") from None
        if request is not None:
            requests.append(request)
        if len(requests) == config.num_requests:
            break
    if not requests:
        raise ConfigError(f"{option}: holds no request{_why_none(config, len(rows))}")
    return requests


# ---- files


def _read(option: str, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Rows with their places in the file: a JSON array, or JSON lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot be read: {error.strerror}") from None
    if data.lstrip()[:1] == b"[":
        try:
            return [
                (f"entry {number}", row)
                for number, row in enumerate(msgspec.json.decode(data, type=list[dict[str, Any]]), 1)
            ]
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{option}: is no JSON array of objects ({error})") from None
    return list(_lines(option, data))


def _lines(option: str, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{option}, line {number}: is no JSON object ({error})") from None


# ---- rows


def _sharegpt(fields: Mapping[str, Any]) -> DatasetRow | None:
    """The first turn and its answer; conversations of one turn have none."""
    turns = next((fields[name] for name in DIALOGUES if name in fields), None)
    if turns is None:
        raise _Unusable(_no_column(("conversations",), fields))
    messages = _messages("conversations", turns)
    if len(messages) < 2:
        return None
    return DatasetRow(prompt=str(messages[0]["content"]), answer=str(messages[1]["content"]))


def _custom(fields: Mapping[str, Any]) -> DatasetRow | None:
    name = next((name for name in PROMPTS if name in fields), None)
    if name is None:
        raise _Unusable(_no_column(("prompt", "messages", "conversations"), fields))
    output_len = next((fields[column] for column in LENGTHS if column in fields), None)
    if output_len is not None and (type(output_len) is not int or output_len < 1):
        raise _Unusable(f"output_tokens must be a whole number of at least 1, got {output_len!r}")
    value = fields[name]
    if name == "prompt":
        is_ids = isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)
        if not (is_ids or (isinstance(value, str) and value)):
            raise _Unusable("prompt must be a text or a list of token ids, and not empty")
        return DatasetRow(prompt=tuple(value) if is_ids else value, output_len=output_len)
    messages = _messages(name, value)
    if name in DIALOGUES:  # as SGLang reads them: the first turn, and its answer
        row = _sharegpt(fields)
        return None if row is None else DatasetRow(prompt=row.prompt, answer=row.answer, output_len=output_len)
    if not messages:
        raise _Unusable("messages must not be empty")
    return DatasetRow(messages=messages, output_len=output_len)


def _messages(column: str, turns: Any) -> tuple[Mapping[str, Any], ...]:
    """Form: {role, content}, or ShareGPT's {from, value}."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        raise _Unusable(f"{column} must be a list of objects with role and content, or from and value")
    found = []
    for turn in turns:
        content = turn.get("content", turn.get("value"))
        if content is None:
            raise _Unusable(f"a turn of {column} has neither content nor value; it has {', '.join(turn) or 'nothing'}")
        speaker = turn.get("from")
        found.append(turn if "content" in turn else {"role": ROLES.get(speaker, speaker), "content": content})
    return tuple(found)


def _no_column(wanted: Sequence[str], fields: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in wanted)
    has = ", ".join(f"`{name}`" for name in fields) or "nothing"
    return f"has no column {names}; it has {has}. Rename the column of prompts to `{wanted[0]}`"


# ---- requests


def _request(row: DatasetRow, config: BenchConfig, tokens: TokenCounter, *, idx: int) -> BenchRequest | None:
    """None if it is too short or too long. Raises _Unusable."""
    if row.messages and config.api != CHAT:
        raise _Unusable("messages are a chat; give --api chat (--backend openai-chat)")
    if isinstance(row.prompt, tuple) and config.api == CHAT:
        raise _Unusable("a chat has texts, not token ids; give --api completions")
    prompt_len = _prompt_len(row, tokens)
    answer_len = tokens.count(row.answer) if tokens and row.answer is not None else None
    if row.answer is not None and tokens and min(prompt_len, answer_len or 0) < MIN_TOKENS:
        return None
    output_len = _output_len(row, config, answer_len)
    if config.dataset_context_len is not None:
        if not prompt_len:
            raise _Unusable("--dataset-context-len needs the tokens of prompts; give --tokenizer")
        if prompt_len + output_len > config.dataset_context_len:
            return None
    return BenchRequest(idx=idx, prompt=row.prompt, messages=row.messages, prompt_len=prompt_len, output_len=output_len)


def _prompt_len(row: DatasetRow, tokens: TokenCounter) -> int:
    """Without a chat's markers; 0 if they cannot be counted."""
    if isinstance(row.prompt, tuple):
        return len(row.prompt)
    if not tokens:
        return 0
    return sum(tokens.count(str(one["content"])) for one in row.messages) or tokens.count(row.prompt, special=True)


def _output_len(row: DatasetRow, config: BenchConfig, answer_len: int | None) -> int:
    if config.dataset_output_len not in (None, -1):
        return int(config.dataset_output_len or 0)
    if row.output_len is not None:
        return row.output_len
    if row.answer is None:
        return config.output_len
    if answer_len is None:
        raise _Unusable(
            "its answer's tokens cannot be counted; give --tokenizer (a directory, a .gguf file, or a model of the hub), or "
            "--dataset-output-len"
        )
    return max(answer_len, 1)


def _why_none(config: BenchConfig, num_rows: int) -> str:
    if not num_rows:
        return '; it is empty. Write a JSON object a line, as {"prompt": "Hello", "output_tokens": 16}'
    limits = f" and at most {config.dataset_context_len} in all" if config.dataset_context_len else ""
    return (
        f": of {num_rows:,} rows none has a prompt and an answer of {MIN_TOKENS} tokens or more{limits}"
        if config.dataset_context_len or config.dataset_name != CUSTOM
        else f": none of {num_rows:,} rows has a turn and its answer"
    )
