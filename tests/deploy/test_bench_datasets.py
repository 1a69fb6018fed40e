"""Files of requests: ShareGPT's conversations and JSON lines, and one message for each mistake in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.config import BenchConfig
from deploy.bench.datasets import read_requests
from deploy.bench.run import requests_of
from deploy.bench.tokens import TokenCounter, token_counter
from deploy.bench.workload import BenchRequest
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from service.flags import ConfigError

TOKENS = token_counter(BenchConfig(tokenizer=DEFAULT_MODEL_PATH))  # a word is a token, and a prompt begins with one
FOUR, FIVE = "k01 v01 k02 v02", "k01 v01 k02 v02 k03"


def talk(*texts: str) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]
    return {"id": "x", "conversations": turns}


def read(path: Path, rows: Any, tokens: TokenCounter = TOKENS, **flags: Any) -> list[BenchRequest]:
    lines = rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
    path.write_text(lines)
    given: dict[str, Any] = {"dataset_path": str(path), "disable_shuffle": True}
    return requests_of(BenchConfig(**(given | flags)), tokens)


def sharegpt(path: Path, rows: list[dict[str, Any]], tokens: TokenCounter = TOKENS, **flags: Any) -> list[BenchRequest]:
    return read(path, json.dumps(rows), tokens, dataset_name="sharegpt", **flags)


def custom(path: Path, rows: Any, tokens: TokenCounter = TOKENS, **flags: Any) -> list[BenchRequest]:
    return read(path, rows, tokens, dataset_name="custom", **flags)


def test_sharegpt_has_first_turns_as_long_as_their_answers(tmp_path: Path) -> None:
    rows = [talk(FOUR, FIVE, "more"), talk(FIVE), talk("k01", FIVE), talk(FIVE, "v01"), talk(FIVE, FOUR)]
    first, second = sharegpt(tmp_path / "f", rows)  # one turn, a short prompt, a short answer are left out
    assert (first.prompt, first.prompt_len, first.output_len, first.idx) == (FOUR, 5, 5, 0)
    assert (second.prompt, second.prompt_len, second.output_len, second.idx) == (FIVE, 6, 4, 1)
    (short,) = sharegpt(tmp_path / "f", rows, dataset_context_len=10, num_requests=1)
    assert short.prompt == FOUR
    assert [r.output_len for r in sharegpt(tmp_path / "f", rows, dataset_output_len=7)] == [7, 7]


def test_sharegpt_needs_a_tokenizer_or_a_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"entry 1: its answer's tokens cannot be counted; give --tokenizer"):
        sharegpt(tmp_path / "f", [talk(FOUR, FIVE)], TokenCounter())
    (request,) = sharegpt(tmp_path / "f", [talk(FOUR, FIVE)], TokenCounter(), dataset_output_len=3)
    assert (request.prompt_len, request.output_len) == (0, 3)


def test_lines_have_prompts_ids_messages_or_conversations(tmp_path: Path) -> None:
    rows = [{"prompt": FOUR, "output_tokens": 9, "note": 1}, {"prompt": [5, 6]}, talk(FOUR, FIVE)]
    text, ids, turn = custom(tmp_path / "f", rows)
    assert (text.prompt, text.prompt_len, text.output_len) == (FOUR, 5, 9)
    assert (ids.prompt, ids.prompt_len, ids.output_len) == ((5, 6), 2, 32)
    assert (turn.prompt, turn.output_len) == (FOUR, 5)
    messages = [{"role": "system", "content": "k01"}, {"role": "user", "content": FIVE}]
    (chat,) = custom(tmp_path / "f", [{"messages": messages, "max_tokens": 2}], api="chat")
    assert (list(chat.messages), chat.prompt_len, chat.output_len) == (messages, 6, 2)


def test_a_seed_chooses_which_requests_and_when(tmp_path: Path) -> None:
    rows = [{"prompt": f"k{number:02d}"} for number in range(40)]

    def chosen(seed: int) -> list[Any]:
        found = custom(tmp_path / "f", rows, disable_shuffle=False, num_requests=10, seed=seed, request_rate=5.0)
        return [(one.prompt, one.at_s) for one in found]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len({prompt for prompt, _ in chosen(1)}) == 10 and chosen(1)[0][1] == 0.0 < chosen(1)[9][1]
    assert len(custom(tmp_path / "f", rows, num_requests=100)) == 40  # none is sent twice


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "holds no request; it is empty. Write a JSON object a line"),
    ("{}", {}, "line 1: has no column `prompt`, `messages`, `conversations`; it has nothing. Rename the column"),
    ('{"text": "a", "id": 1}', {}, "it has `text`, `id`. Rename the column of prompts to `prompt`"),
    ('{"prompt": "a"}\n{"prompt": ', {}, "line 2: is no JSON object"),
    ('[{"prompt": "a"}, 5]', {}, "is no JSON array of objects"),
    ('{"prompt": ""}', {}, "line 1: prompt must be a text or a list of token ids, and not empty"),
    ('{"prompt": [1, "x"]}', {}, "line 1: prompt must be a text or a list of token ids"),
    ('{"prompt": "a", "output_tokens": 0}', {}, "line 1: output_tokens must be a whole number of at least 1, got 0"),
    ('{"prompt": [1]}', {"api": "chat"}, "line 1: a chat has texts, not token ids"),
    ('{"messages": []}', {"api": "chat"}, "line 1: messages must not be empty"),
    ('{"messages": "hi"}', {"api": "chat"}, "line 1: messages must be a list of objects"),
    (
        '{"messages": [{"role": "user"}]}',
        {"api": "chat"},
        "a turn of messages has neither content nor value; it has role",
    ),
    ('{"messages": [{"role": "user", "content": "a"}]}', {}, "line 1: messages are a chat; give --api chat"),
    ('{"conversations": [{"from": "human", "value": "a"}]}', {}, "none of 1 rows has a turn and its answer"),
    (
        '{"prompt": "k01 v01"}',
        {"dataset_context_len": 9},
        "holds no request: of 1 rows none has a prompt and an answer",
    ),
    ('{"prompt": "a"}', {"dataset_name": "sharegpt"}, "line 1: has no column `conversations`; it has `prompt`"),
    (json.dumps(talk("k01", "v01")), {"dataset_name": "sharegpt"}, "none has a prompt and an answer of 4 tokens"),
]


@pytest.mark.parametrize(("text", "flags", "said"), BAD)
def test_a_mistake_in_a_file_is_one_message(tmp_path: Path, text: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "f", text, **({"dataset_name": "custom"} | flags))
    message = str(caught.value)
    assert message.startswith(f"--dataset-path {tmp_path / 'f'}") and said in message and "\n" not in message


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = BenchConfig(dataset_name="custom", dataset_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^--dataset-path .*none: cannot be read: No such file"):
        read_requests(config, TokenCounter())
    for given, said in ((str(tmp_path), "has no tokenizer.json"), ("no-such", "no such directory or file")):
        with pytest.raises(ConfigError, match=f"^--tokenizer {given}: {said}"):
            token_counter(BenchConfig(tokenizer=given))


def test_the_tokenizer_of_a_model_directory_needs_no_flag(tmp_path: Path) -> None:
    assert token_counter(BenchConfig(model=DEFAULT_MODEL_PATH)).count(FIVE) == 5
    assert not token_counter(BenchConfig(model="some/model")) and not token_counter(BenchConfig(model=str(tmp_path)))
