"""Allowed tokens and bad words: kept, and the same tokens through two workers at depth 2 as through one, greedy and sampled."""

import json
import random
import re
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, post, session
from tests.e2e.cluster import Cluster
from tests.engine.engine_in_process import prompt_of

ALLOWED = sorted(random.Random(5).sample(range(20, 272), 12))


def bodies() -> list[dict[str, Any]]:
    """Greedy, sampled, penalised and biased, with a minimum of tokens; a prompt longer than a chunk among them."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "sampling_seed": 3},
        {"temperature": 1.0, "sampling_seed": 4, "repetition_penalty": 1.3, "top_p": 0.9},
        {"temperature": 0, "logit_bias": {str(ALLOWED[0]): 3.0}, "min_new_tokens": 24},
    ]
    return [
        {"input_ids": prompt_of(length, seed), "sampling_params": {"max_new_tokens": 24, "ignore_eos": True, **way}}
        for seed, (length, way) in enumerate((length, way) for length in (20, 150) for way in ways)
    ]


def with_rule(body: dict[str, Any], **rule: Any) -> dict[str, Any]:
    return {**body, "sampling_params": {**body["sampling_params"], **rule}}


async def tokens(cluster: Cluster, asked: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in await generate_all(cluster.router, asked)]


async def test_allowed_tokens(unified: Cluster, pd: Cluster) -> None:
    asked = [with_rule(body, allowed_token_ids=ALLOWED) for body in bodies()]
    one, two = [await tokens(c, asked) for c in (unified, pd)]
    assert one == two and {t for answer in one for t in answer} <= set(ALLOWED)
    assert all(len(answer) == 24 for answer in one)
    await assert_all_back(pd)


async def test_bad_words(unified: Cluster, pd: Cluster) -> None:
    """Words that the plain answers have, of one token and of two, are gone."""
    free = await generate_all(unified.router, bodies())
    async with session() as http:

        async def text(ids: list[int]) -> str:
            status, answer = await post(http, f"{unified.router}/detokenize", {"tokens": ids})
            assert status == 200
            return str(answer["text"])

        words = [[(await text(a["output_ids"][2:3])).strip(), (await text(a["output_ids"][3:5])).strip()] for a in free]
        words = [[word for word in some if word and "\ufffd" not in word] for some in words]
        assert sum(map(bool, words)) >= 4
        asked = [with_rule(body, bad_words=bad) for body, bad in zip(bodies(), words, strict=True)]
        one, two = [await tokens(c, asked) for c in (unified, pd)]
        spelled = []
        for some in words:
            answers = [
                (await post(http, f"{unified.router}/tokenize", {"prompt": space + word, "add_special_tokens": False}))[
                    1
                ]
                for word in some
                for space in ("", " ")
            ]
            spelled.append([answer["tokens"] for answer in answers])
    assert one == two
    for answer, bad, plain in zip(one, spelled, free, strict=True):
        assert not any(answer[i : i + len(ids)] == ids for ids in bad for i in range(len(answer)))
        assert not bad or answer != plain["output_ids"]
    await assert_all_back(pd)


async def test_rules_beside_a_grammar(unified: Cluster, pd: Cluster) -> None:
    """Answers keep both; where a state leaves no token, the request is refused and its workers stay in use."""
    async with session() as http:
        letters = {
            char: (await post(http, f"{unified.router}/tokenize", {"prompt": char}))[1]["tokens"][-1]
            for char in "abcd,"
        }
        few = [letters[char] for char in "abd,"]
        rules: list[dict[str, Any]] = [
            {"regex": "([a-f]{1,3},){2,6};?", "allowed_token_ids": few, "bad_words": ["ba"]},
            {
                "json_schema": {"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 2, "maxItems": 9},
                "bad_words": ["c"],
            },
        ]
        asked = [
            {"text": "say something " * (1 + 9 * seed), "sampling_params": {"max_new_tokens": 40, **way, **rule}}
            for rule in rules
            for seed, way in enumerate(({"temperature": 0}, {"temperature": 1.0, "sampling_seed": 3}))
        ]
        one, two = [await generate_all(c.router, asked) for c in (unified, pd)]
        assert [a["output_ids"] for a in one] == [a["output_ids"] for a in two]
        for answer in one[:2]:
            assert re.fullmatch("([abd]{1,3},){2,6}", answer["text"]) and "ba" not in answer["text"]
            assert set(answer["output_ids"]) <= set(few)
        assert all(set(json.loads(answer["text"])) == {"ab"} for answer in one[2:] if answer["text"].endswith("]"))
        dead_end = {"text": "x", "sampling_params": {"regex": "aac", "allowed_token_ids": [letters["a"]]}}
        for c in (unified, pd):
            for body, message in (
                (dead_end, "grammar: allowed_token_ids and bad_words leave no token"),
                (
                    {"text": "x", "sampling_params": {"regex": "c", "allowed_token_ids": few}},
                    "regex: allowed_token_ids",
                ),
            ):
                status, refusal = await post(http, f"{c.router}/generate", body)
                assert status == 400 and message in refusal["error"]["message"]
    await assert_all_back(pd)


async def test_hidden_states_and_token_ids_of_openais_routes(unified: Cluster, pd: Cluster) -> None:
    prompt = prompt_of(150, 9)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    wanted = {"return_hidden_states": True, "return_token_ids": True}
    native = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    (expected,) = await generate_all(unified.router, [{**native, "return_hidden_states": True}])
    async with session() as http:
        for c in (unified, pd):
            status, answer = await post(http, f"{c.router}/v1/completions", {**body, **wanted})
            (choice,) = answer["choices"]
            assert status == 200 and choice["token_ids"] == expected["output_ids"]
            assert choice["prompt_token_ids"] == prompt
            assert choice["hidden_states"] == pytest.approx(expected["meta_info"]["hidden_states"][-1], abs=1e-4)
            async with http.post(f"{c.router}/v1/completions", json={**body, **wanted, "stream": True}) as stream:
                choices = [
                    json.loads(line[6:])["choices"][0] async for line in stream.content if line.startswith(b"data: {")
                ]
            assert [t for chunk in choices for t in chunk["token_ids"]] == expected["output_ids"]
            assert [chunk.get("hidden_states") for chunk in choices][:-1] == [None] * (len(choices) - 1)
            assert choices[-1]["hidden_states"] == pytest.approx(choice["hidden_states"], abs=1e-4)
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **wanted}
            status, answer = await post(http, f"{c.router}/v1/chat/completions", chat)
            assert status == 200 and answer["choices"][0]["hidden_states"] == []
            longer = {**chat, "max_tokens": 3, "ignore_eos": True, "stream": True}
            async with http.post(f"{c.router}/v1/chat/completions", json=longer) as stream:
                choices = [
                    json.loads(line[6:])["choices"][0] async for line in stream.content if line.startswith(b"data: {")
                ]
            assert len(choices[-1]["delta"]["hidden_states"]) == len(choice["hidden_states"])
    await assert_all_back(pd)
