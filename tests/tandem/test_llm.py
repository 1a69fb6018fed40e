"""`LLM`: its tokens are a server's, its results have the prompts' order, its errors name the argument."""

import asyncio
import io
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tandem import LLM, AsyncLLM, RequestError, SamplingParams, TandemError
from tandem.errors import FOREIGN
from tests.e2e.cluster import wait_until
from tests.tandem.conftest import Post
from tools.recall import vocab

PROMPT = "k17 v42 k03 v91 k17"
IDS = vocab.encode(PROMPT)
MESSAGES = [{"role": "user", "content": PROMPT}]
SEEDED = {"temperature": 40.0, "ignore_eos": True, "max_tokens": 12, "seed": 5}
LONG = {"ignore_eos": True, "max_tokens": 4000}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "defaults": {"temperature": 0},
    "greedy": {"temperature": 0, "max_tokens": 6},
    "seeded": SEEDED,
    "samples": {**SEEDED, "n": 3},
    "stop": {"temperature": 0, "max_tokens": 8, "stop": ["v91"]},
    "constrained": {"temperature": 0, "max_tokens": 4, "structured_outputs": {"choice": [" v91"]}},
    "nothing new": {"temperature": 0, "max_tokens": 0},
}
CHATS: dict[str, dict[str, Any]] = {
    "defaults": {"temperature": 0},
    "seeded": SEEDED,
    "samples": {**SEEDED, "n": 2},
}


@pytest.fixture(autouse=True)
def returned(llm: LLM) -> Iterator[None]:
    """After each test nothing runs, and all memory is back."""
    yield
    wait_until(lambda: not running(llm), within_s=30, what="the engine is idle")
    llm._worker.run(llm._services.leaders.states(timeout_s=20.0, check=True))


def running(llm: LLM) -> int:
    states = llm._worker.run(llm._services.leaders.states(timeout_s=20.0))
    return sum(state.running + sum(state.queues.values()) for state in states)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_tokens_of_a_prompt_are_the_servers(llm: LLM, post: Post, name: str) -> None:
    params = COMPLETIONS[name]
    for prompt in (PROMPT, IDS):
        (ours,) = llm.generate([prompt], **params)
        choices = post("/v1/completions", {"prompt": prompt, **params, "return_token_ids": True})["choices"]
        assert [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in ours.outputs] == [
            (c["text"], c["token_ids"], c["finish_reason"], c["matched_stop"]) for c in choices
        ]
        assert (ours.prompt_token_ids, ours.prompt) == (IDS, prompt if isinstance(prompt, str) else None)
        assert ours.finished and len({o.index for o in ours.outputs}) == params.get("n", 1)


@pytest.mark.parametrize("name", CHATS)
def test_tokens_of_a_chat_are_the_servers(llm: LLM, post: Post, name: str) -> None:
    (ours,) = llm.chat(MESSAGES, **CHATS[name])
    body = {"messages": MESSAGES, **CHATS[name], "return_token_ids": True}
    choices = post("/v1/chat/completions", body)["choices"]
    assert [(o.text, o.token_ids, o.finish_reason) for o in ours.outputs] == [
        (c["message"]["content"], c["token_ids"], c["finish_reason"]) for c in choices
    ]
    assert ours.prompt_token_ids == choices[0]["prompt_token_ids"]


def test_logprobs_are_the_servers(llm: LLM, post: Post) -> None:
    params = {"max_tokens": 3, "temperature": 0}
    (ours,) = llm.generate(PROMPT, logprobs=2, prompt_logprobs=2, **params)
    table = post("/v1/completions", {"prompt": PROMPT, **params, "echo": True, "logprobs": 2})["choices"][0]["logprobs"]
    assert ours.prompt_logprobs is not None and ours.logprobs is not None and ours.prompt_logprobs[0] is None
    positions = [*ours.prompt_logprobs[1:], *ours.logprobs]
    chosen = [p[token] for p, token in zip(positions, [*IDS[1:], *ours.token_ids], strict=True)]
    assert [one.logprob for one in chosen] == pytest.approx(table["token_logprobs"][1:])
    for position, top in zip(positions, table["top_logprobs"][1:], strict=True):
        assert sorted(one.logprob for one in position.values()) == pytest.approx(sorted(top.values()))
    assert [one.rank for one in chosen[-3:]] == [1, 1, 1]
    chat = llm.chat(MESSAGES, logprobs=True, top_logprobs=1, max_tokens=1, temperature=0)[0]
    assert chat.logprobs is not None and [one.rank for one in chat.logprobs[0].values()] == [1]


def test_vectors_are_the_servers(llm: LLM, post: Post) -> None:
    ours = llm.embed([PROMPT, "k01 v02"], dimensions=8)
    rows = post("/v1/embeddings", {"input": [PROMPT, "k01 v02"], "dimensions": 8})["data"]
    assert [one.embedding for one in ours] == [pytest.approx(row["embedding"]) for row in rows]
    assert ours[0].outputs.embedding == ours[0].embedding and ours[0].prompt_token_ids == IDS


def test_scores_are_the_servers(llm: LLM, post: Post) -> None:
    ours = llm.score(PROMPT, ["k17", "v42"])
    rows = post("/score", {"text_1": PROMPT, "text_2": ["k17", "v42"]})["data"]
    assert [one.score for one in ours] == [pytest.approx(row["score"]) for row in rows]
    assert ours[0].outputs.score == ours[0].score


@pytest.mark.parametrize(("query", "items"), [(PROMPT, [" v42", " k03"]), (IDS, [IDS[:1], IDS[:2]])])
def test_scores_of_labels_are_the_servers(llm: LLM, post: Post, query: Any, items: Any) -> None:
    labels = {"label_token_ids": [5, 7, 9], "apply_softmax": True, "item_first": True}
    ours = llm.score(query, items, **labels)
    rows = post("/v1/score", {"query": query, "items": items, **labels})["scores"]
    assert [one.scores for one in ours] == [pytest.approx(row) for row in rows]
    assert [one.score for one in ours] == [row[0] for row in (one.scores for one in ours)]
    assert llm.score(query=query, items=items, **labels) == ours  # SGLang's names


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    """More than run at a time: the engine batches, and no request is refused for a full queue."""
    limit = llm._slots.limit
    numbers = [(7 * i) % 90 for i in range(limit + 40)]
    outputs = llm.generate([f"k{n:02d} v{n:02d} k{n:02d}" for n in numbers], max_tokens=1, temperature=0)
    assert [one.text for one in outputs] == [f" v{n:02d}" for n in numbers]
    assert [one.prompt for one in outputs[:2]] == ["k00 v00 k00", "k07 v07 k07"] and llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), {"max_new_tokens": 2}, None]
    outputs = llm.generate([PROMPT, IDS, {"prompt": PROMPT}], params, temperature=0)
    assert [len(one.token_ids) for one in outputs] == [1, 2, 16]


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"temprature": 1}, "temprature", "is no argument of this call; did you mean temperature?"),
        ({"temperature": -1}, "temperature", "must be between 0 and"),
        ({"max_tokens": "4"}, "max_tokens", "expected `int | null`, got `str`"),
        ({"max_tokens": 10**6}, "prompt", r"maximum context length .* \(prompt\)"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
        ({"use_beam_search": True}, "use_beam_search", "is not supported"),
        ({"lora_path": "poems"}, "lora_path", "no adapter .poems. is loaded; loaded: none"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(
    llm: LLM, params: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as wrong:
        llm.generate([PROMPT, PROMPT], [LONG, params])
    assert wrong.value.field == field and "(input 2 of 2)" in str(wrong.value)
    assert not running(llm)


def test_wrong_inputs_are_named(llm: LLM) -> None:
    for prompt, message in (
        ("", "prompt: must not be empty"),
        ([1, 10**6], "prompt: 1000000 is not a token id"),
        (
            {"prompt": "k1", "multi_modal_data": {"image": 1}},
            "prompt: a dict has either prompt or prompt_token_ids; images go",
        ),
        ({}, "prompt: a dict has either"),
        ([None], "prompt: must be a text or a list of token ids, got NoneType"),
        ([b"k1"], "prompt: must be a text or a list of token ids, got bytes"),
        ([["k1", "k2"]], "prompt: must be a text or a list of token ids, got a list of str"),
        ([{"prompt_token_ids": [1.5]}], "prompt: must be a text or a list of token ids, got a list of float"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt)
    with pytest.raises(RequestError, match=r"messages\[0\].role"):
        llm.chat([{"role": "owner", "content": "k1"}])
    with pytest.raises(RequestError, match="instruction: is no argument of this call; did you mean instruct"):
        llm.score("a", "b", instruction="c")
    for inputs, field, message in (
        ({"text_2": "b"}, "text_1", "is missing"),
        ({"text_1": "a", "items": "b", "text_2": "c"}, "text_2", "is given by two names"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", "has 2 texts, text_2 has 1; give one, or as many"),
        ({"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids", "must have at least one token id"),
    ):
        with pytest.raises(RequestError, match=f"^{field}: {message}") as wrong:
            llm.score(**inputs)
        assert wrong.value.field == field
    with pytest.raises(RequestError, match="lora_path: has 1 entries for 2 prompts; give one for all, or one each"):
        llm.generate(["a", "b"], lora_path=["poems"])


def test_an_adapter_answers_its_prompts_until_it_is_unloaded(llm: LLM, adapter: str) -> None:
    llm.load_lora_adapter("poems", Path(adapter))
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (plain,) = llm.generate(PROMPT, **greedy)
    (tuned,) = llm.generate(PROMPT, **greedy, lora_path="poems")
    outputs = llm.generate([PROMPT] * 3, greedy, lora_path=["poems", None, "poems"])
    assert [one.token_ids for one in outputs] == [tuned.token_ids, plain.token_ids, tuned.token_ids]
    assert tuned.token_ids != plain.token_ids
    with pytest.raises(RequestError, match="poems"):
        llm.load_lora_adapter("poems", adapter)
    llm.unload_lora_adapter("poems")
    with pytest.raises(RequestError, match="poems") as unknown:
        llm.generate(PROMPT, lora_path="poems")
    assert unknown.value.field == "lora_path"


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_call_aborts_its_requests(llm: LLM) -> None:
    """Ctrl-C raises KeyboardInterrupt where the main thread waits."""
    threading.Thread(
        target=lambda: (wait_until(lambda: bool(running(llm)), within_s=30, what="it runs"), _interrupt())
    ).start()
    llm.pause("in_place")  # nothing ends by itself
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 3, **LONG)
        wait_until(lambda: not running(llm), within_s=30, what="aborted")
    finally:
        llm.resume()
    assert llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text == " v42"


def _interrupt() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)  # interrupt_main would not wake a waiting thread


async def test_a_running_event_loop_does_no_harm(llm: LLM) -> None:
    """As in a notebook's cells."""
    assert asyncio.get_running_loop().is_running()
    assert llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text == " v42"


def test_threads_share_an_engine(llm: LLM) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda i: llm.generate(f"k0{i} v1{i} k0{i}", max_tokens=1, temperature=0)[0].text, range(8))
        assert list(texts) == [f" v1{i}" for i in range(8)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_is_for_terminals(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    for stream, use_tqdm in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate([PROMPT] * 2, max_tokens=1, use_tqdm=use_tqdm)
        shown.append(stream.getvalue())
    assert "2/2" in shown[0] and shown[1:] == ["", ""]


def test_a_pause_lets_calls_wait(llm: LLM) -> None:
    llm.pause("in_place")
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(llm.generate, PROMPT, max_tokens=1, temperature=0)
        wait_until(lambda: bool(running(llm)), within_s=30, what="it waits")
        assert not later.done()
        llm.resume()
        assert later.result(timeout=30)[0].text == " v42"
    with pytest.raises(RequestError, match="mode: must be one of abort, retract"):
        llm.pause("slowly")


def test_released_memory_comes_back(llm: LLM) -> None:
    llm.release_memory(["kv_cache"])
    try:
        with pytest.raises(TandemError, match=r"has released its memory \(kv_cache\): resume_memory\(\)$"):
            llm.generate(PROMPT, max_tokens=1)
    finally:
        llm.resume_memory(["kv_cache"])
    assert llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text == " v42"
    with pytest.raises(RequestError, match=r"tags: must be of .*, got .nothing."):
        llm.release_memory(["nothing"])


def test_weights_come_as_tensors(llm: LLM) -> None:
    own = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
    name = next(name for name in own if name.endswith("norm.weight"))
    llm.update_weights([(name, torch.zeros_like(own[name]))], weight_version="nothing")
    changed = llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text
    first, second = [one for one in own if one.endswith("norm.weight") and own[one].shape == own[name].shape][:2]
    shared = torch.stack([own[first], own[second]])  # in one memory, as tied weights of a model
    llm.update_weights({**own, first: shared[0], second: shared[1]}.items(), weight_version="own")
    assert llm.get_server_info()["weight_version"] == "own"
    assert llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text == " v42" != changed
    for tensors, says in (
        ([], "at least one"),
        ([("a", own[name])] * 2, "twice"),
        ([("no.such", own[name])], "no.such"),
        (5, "source: must be a checkpoint's path, or pairs of name and torch tensor, .* got int"),
        ([name], "source: .* got str"),
        ({name: 5}, "source: .* got tuple"),
        ({name: torch.ones(3)}, "serialized_named_tensors: tensor .* has shape"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.update_weights(tensors)


def test_names_of_other_engines_lead_to_ours(llm: LLM) -> None:
    for name, ours in FOREIGN.items():
        with pytest.raises(AttributeError, match=f"LLM has no {name}; use {ours}"):
            getattr(llm, name)
        assert hasattr(AsyncLLM if ours.startswith("AsyncLLM.") else LLM, ours.removeprefix("AsyncLLM."))
    with pytest.raises(AttributeError, match=r"LLM has no naps$"):
        getattr(llm, "naps")  # noqa: B009


def test_weights_come_from_another_checkpoint(llm: LLM) -> None:
    llm.update_weights(DEFAULT_MODEL_PATH, weight_version="second")
    assert llm.get_server_info()["weight_version"] == "second"
    with pytest.raises(RequestError, match="/nowhere"):
        llm.update_weights("/nowhere")
    assert llm.generate(PROMPT, max_tokens=1, temperature=0)[0].text == " v42"
