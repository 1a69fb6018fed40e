"""Prefixes: their names, from bodies as clients write them, and the table of who has them."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.body import Api, parse_body
from router.choice.prefix_index import MAX_KEYS, SWEEP, PrefixIndex, chain, prompt_keys
from service.kv_events import BLOCK_BYTES, BLOCK_TOKENS, token_bytes, token_seed
from tests.router.dummies import depths


def keys(api: Api, **fields: Any) -> list[int]:
    return prompt_keys(parse_body(api, json.dumps(fields).encode()))


def chat(*texts: str, **fields: Any) -> list[int]:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return keys(Api.CHAT, messages=messages, **fields)


def test_the_next_turn_of_a_conversation_begins_with_the_keys_of_the_last() -> None:
    one, two = chat("q" * 2000), chat("q" * 2000, "a" * 1000, "more")
    assert len(one) == 3 and len(two) == 6
    assert two[:3] == one
    assert chat("r" + "q" * 2000)[:1] != one[:1]


@pytest.mark.parametrize(("api", "last"), [(Api.MESSAGES, "messages"), (Api.OLLAMA_GENERATE, "prompt")])
def test_two_requests_share_the_keys_of_their_system_prompt(api: Api, last: str) -> None:
    one, two, other = (
        keys(api, system=system, **{last: text})
        for system, text in (("s" * 2000, "q" * 999), ("s" * 2000, "r" * 999), ("t" * 2000, "q" * 999))
    )
    assert one[:3] == two[:3] and not set(one[3:]) & set(two[3:]) and not set(one) & set(other)


@pytest.mark.parametrize(
    "other",
    [{"tools": [{"type": "function"}]}, {"model": "m2"}, {"lora_path": "l"}, {"cache_salt": "s"}, {"extra_key": "s"}],
)
def test_what_stands_before_the_prompt_makes_another_prefix(other: dict[str, Any]) -> None:
    assert not set(chat("q" * 3000, model="m")) & set(chat("q" * 3000, **{"model": "m", **other}))


def test_text_and_its_batch_and_ids_and_their_batch_have_the_same_prefix() -> None:
    text, ids = "t" * 3000, list(range(1000))
    assert keys(Api.GENERATE, text=text)[:5] == keys(Api.GENERATE, text=[text, "b"])[:5]
    assert keys(Api.COMPLETIONS, prompt=text) == keys(Api.COMPLETIONS, prompt=[text])[:5]
    expected = chain(token_seed(), token_bytes(ids))
    assert len(expected) == 1000 // BLOCK_TOKENS
    assert expected == keys(Api.GENERATE, input_ids=ids) == keys(Api.GENERATE, input_ids=[ids, [1]])
    assert expected == keys(Api.COMPLETIONS, prompt=ids) == keys(Api.EMBEDDINGS, input=ids)
    assert not set(expected) & set(keys(Api.GENERATE, input_ids=ids, lora_path="l"))


def test_namespaces_have_other_keys_and_one_that_is_written_otherwise_the_same() -> None:
    ids, text = list(range(1000)), "t" * 3000
    bodies: list[dict[str, Any]] = [{"input_ids": ids}, {"text": text}]
    for body in bodies:
        salted = [
            keys(Api.GENERATE, **body, **fields)
            for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"})
        ]
        assert len({key for chained in salted for key in chained}) == sum(map(len, salted)) == 4 * len(salted[0])
        assert keys(Api.GENERATE, **body, extra_key="a") == keys(Api.GENERATE, **body, cache_salt=["a", "b"])
        assert keys(Api.GENERATE, **body, extra_key="", cache_salt=None) == salted[0]
    expected = chain(token_seed(namespace=("s",)), token_bytes(ids))
    assert (
        expected == keys(Api.COMPLETIONS, prompt=ids, cache_salt="s") == keys(Api.EMBEDDINGS, input=ids, extra_key="s")
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": ""},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [-1] * 500},
        {"input_ids": [2**40] * 500},
        {"input_ids": [1.5] * 500},
        {"input_ids": ["x"] * 10},
        {"text": 7},
        {"text": {"a": 1}},
        {"text": None, "input_ids": None},
    ],
)
def test_what_is_no_prompt_has_no_keys(fields: dict[str, Any]) -> None:
    assert keys(Api.GENERATE, **fields) == []


def test_a_short_prompt_has_no_keys_and_an_endless_one_a_bounded_number() -> None:
    assert keys(Api.GENERATE, text="t" * (BLOCK_BYTES - 3)) == []
    assert len(chain(b"", b"x" * (BLOCK_BYTES * MAX_KEYS + 5 * BLOCK_BYTES))) == MAX_KEYS


@settings(max_examples=50)
@given(st.binary(max_size=6000), st.integers(0, 6000), st.binary(min_size=1, max_size=8))
def test_keys_agree_exactly_as_far_as_the_bytes_do(data: bytes, at: int, other: bytes) -> None:
    at = min(at, len(data))
    changed = data[:at] + other + data[at + len(other) :]
    same = next(
        (i for i, (a, b) in enumerate(zip(data, changed, strict=False)) if a != b), min(len(data), len(changed))
    )
    mine, theirs = chain(b"s", data), chain(b"s", changed)
    shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
    assert shared == min(same // BLOCK_BYTES, len(mine), len(theirs))


def path(name: str, length: int) -> list[bytes]:
    return [f"{name[: i + 1]}/{i}".encode() for i in range(length)]


def test_the_least_recently_used_goes_first_and_the_front_of_a_prefix_last() -> None:
    index = PrefixIndex(max_blocks=4)
    index.touch(0, path("aaa", 3))
    index.touch(0, path("b", 1))
    index.touch(0, path("c", 1))
    assert depths(index, path("aaa", 3)) == {0: 2}
    index.touch(0, path("aa", 2))
    index.touch(0, path("d", 1))
    assert depths(index, path("aa", 2)) == {0: 2} and depths(index, path("b", 1)) == {}
    assert index.num_blocks(0) == 4 == len(index)
    index.check()


def test_guesses_beyond_what_the_worker_holds_are_dropped_oldest_first() -> None:
    index = PrefixIndex(max_blocks=10)
    index.store_all(0, [b"told"])
    index.touch(0, path("aaa", 3))
    index.touch(0, path("bb", 2))
    index.shrink(0, 4)
    assert depths(index, path("bb", 2)) == {0: 2} and depths(index, path("aaa", 3)) == {0: 1}
    index.shrink(0, 0)
    assert index.num_blocks(0) == 1
    index.check()


def test_a_worker_that_left_is_unknown_at_once_and_its_entries_go_in_slices() -> None:
    index = PrefixIndex(max_blocks=10_000)
    many = [f"{i}".encode() for i in range(3 * SWEEP)]
    index.touch(0, many)
    index.touch(1, many[:1])
    index.forget(0)
    assert depths(index, many) == {1: 1}
    index.touch(2, many[:2])  # takes another bit: those of the one that left are still there
    assert depths(index, many) == {1: 1, 2: 2}
    sizes = []
    while len(index) > 2:
        sizes.append(len(index))
        index.touch(1, many[:1])
        index.check()
    assert len(sizes) >= 2 and max(a - b for a, b in itertools.pairwise(sizes)) <= SWEEP
    index.touch(3, many[:1])
    index.check()
    assert depths(index, many[:1]) == {1: 1, 2: 1, 3: 1}


class Model(RuleBasedStateMachine):
    """Against sets: whatever is done, the table says of a worker what was told of it, less what had to go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=6)
        self.may_have: dict[int, set[bytes]] = {}
        self.told: dict[int, set[bytes]] = {}

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=5))
    def touch(self, worker: int, name: str) -> None:
        self.index.touch(worker, path(name, len(name)))
        self.may_have.setdefault(worker, set()).update(path(name, len(name)))
        assert depths(self.index, path(name, len(name)))[worker] == len(name)

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=3))
    def store(self, worker: int, name: str) -> None:
        key = path(name, len(name))[-1]
        if len(self.told.setdefault(worker, set())) < 6:
            self.told[worker].add(key)
        self.index.store_all(worker, [key])

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=3))
    def remove(self, worker: int, name: str) -> None:
        key = path(name, len(name))[-1]
        for known in (self.told, self.may_have):
            known.setdefault(worker, set()).discard(key)
        self.index.remove_all(worker, [key])

    @rule(worker=st.integers(0, 3), blocks=st.integers(0, 6))
    def shrink(self, worker: int, blocks: int) -> None:
        self.index.shrink(worker, blocks)
        assert self.index.num_blocks(worker) <= max(blocks, len(self.told.get(worker, ())))

    @rule(worker=st.integers(0, 3))
    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.may_have.pop(worker, None)
        self.told.pop(worker, None)

    @rule(name=st.text("ab", min_size=1, max_size=5))
    def match(self, name: str) -> None:
        found = depths(self.index, path(name, len(name)))
        for worker in range(4):
            told = self.told.get(worker, set())
            known = [key in told or key in self.may_have.get(worker, ()) for key in path(name, len(name))]
            surely = [key in told for key in path(name, len(name))]
            assert _run(surely) <= found.get(worker, 0) <= _run(known)

    @invariant()
    def holds(self) -> None:
        self.index.check()


def _run(flags: list[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=30)
