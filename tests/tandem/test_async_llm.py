"""`AsyncLLM`: streams, and aborts where its consumer leaves."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tandem import AsyncLLM, RequestError, RequestOutput
from tests.tandem.test_llm import LONG, MESSAGES, PROMPT, SEEDED
from tests.trainers.trainer import HOST, trainer

PATIENCE_S = 30.0


async def running(llm: AsyncLLM) -> int:
    s = await llm._ready()
    states = await llm._run(s.leaders.states(timeout_s=20.0))
    return sum(state.running + sum(state.queues.values()) for state in states)


async def until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await running(llm):
            await asyncio.sleep(0.02)
    assert llm._slots is not None and llm._slots._taken == 0


async def collected(llm: AsyncLLM, prompt: Any, **params: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, **params)]


async def test_a_stream_is_the_whole_answer_in_parts(async_llm: AsyncLLM) -> None:
    params = {**SEEDED, "max_tokens": 200, "n": 2}  # many: a consumer that comes late gets several tokens as one part
    outputs = await collected(async_llm, PROMPT, **params)
    whole = (await collected(async_llm, PROMPT, **params))[-1]
    for index, sample in enumerate(whole.outputs):
        assert "".join(output.outputs[index].delta for output in outputs) == sample.text
        assert outputs[-1].outputs[index].token_ids == sample.token_ids
    assert len(outputs) > 2 and [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_a_chat_streams(async_llm: AsyncLLM) -> None:
    outputs = [output async for output in async_llm.chat(MESSAGES, temperature=0, logprobs=1)]
    assert outputs[-1].text.split()[0] == "v42" and outputs[-1].logprobs


async def test_streams_run_together(async_llm: AsyncLLM) -> None:
    answers = await asyncio.gather(
        *(collected(async_llm, f"k0{i} v1{i} k0{i}", max_tokens=1, temperature=0) for i in range(8))
    )
    assert [outputs[-1].text for outputs in answers] == [f" v1{i}" for i in range(8)]


async def test_a_consumer_that_leaves_aborts(async_llm: AsyncLLM) -> None:
    async for output in async_llm.generate(PROMPT, **LONG):
        assert not output.finished
        break
    await until_idle(async_llm)


async def test_a_cancelled_consumer_aborts(async_llm: AsyncLLM) -> None:
    consumer = asyncio.create_task(collected(async_llm, PROMPT, **LONG))
    async with asyncio.timeout(PATIENCE_S):
        while not await running(async_llm):
            await asyncio.sleep(0.02)
    consumer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await consumer
    assert consumer.cancelled()
    await until_idle(async_llm)


async def test_a_request_is_aborted_by_its_name(async_llm: AsyncLLM) -> None:
    outputs = []
    async for output in async_llm.generate(PROMPT, **LONG, rid="mine"):
        outputs.append(output)
        await async_llm.abort("mine")
    assert (outputs[-1].request_id, outputs[-1].finish_reason) == ("mine", "abort")
    await until_idle(async_llm)


def test_several_event_loops_share_an_engine(async_llm: AsyncLLM) -> None:
    for _ in range(2):
        outputs = asyncio.run(collected(async_llm, PROMPT, max_tokens=1, temperature=0))
        assert outputs[-1].text == " v42"


async def test_vectors_and_errors_are_awaited(async_llm: AsyncLLM) -> None:
    assert [len(one.embedding) for one in await async_llm.embed([PROMPT, "k1"], dimensions=4)] == [4, 4]
    with pytest.raises(RequestError, match="temperature: must be"):
        await collected(async_llm, PROMPT, temperature=-1)
    with pytest.raises(RequestError, match="prompt: must be a text or a list of token ids, got a list of str"):
        await collected(async_llm, [PROMPT, PROMPT])
    assert len(await async_llm.score("k1", ["k1", "v2"])) == 2
    labelled = await async_llm.score("k1", ["k1", "v2"], [5, 7], apply_softmax=True)
    assert [(len(one.scores), pytest.approx(1.0)) for one in labelled] == [(2, sum(one.scores)) for one in labelled]


async def test_an_adapter_is_loaded_streams_and_is_unloaded(async_llm: AsyncLLM, adapter: str) -> None:
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    await async_llm.load_lora_adapter("poems", adapter)
    plain, tuned = await asyncio.gather(
        collected(async_llm, PROMPT, **greedy), collected(async_llm, PROMPT, **greedy, lora_path="poems")
    )
    assert len(tuned[-1].token_ids) == 4 and tuned[-1].token_ids != plain[-1].token_ids
    await async_llm.unload_lora_adapter("poems")
    with pytest.raises(RequestError, match="poems"):
        await collected(async_llm, PROMPT, lora_path="poems")


async def test_a_trainer_broadcasts_weights_to_its_group(async_llm: AsyncLLM) -> None:
    own = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
    names = [name for name in own if name.endswith("norm.weight")]
    with trainer(DEFAULT_MODEL_PATH) as source:
        await async_llm.update_weights([(name, torch.zeros_like(own[name])) for name in names])
        assert (await collected(async_llm, PROMPT, max_tokens=1, temperature=0))[-1].text != " v42"
        await async_llm.init_weights_update_group(HOST, source.port, 1, source.world_size, backend="gloo")
        source.await_line("open")
        source.send(names)
        await async_llm.update_weights_from_distributed(
            names, [own[name].dtype for name in names], [own[name].shape for name in names], weight_version="sent"
        )
        assert (await collected(async_llm, PROMPT, max_tokens=1, temperature=0))[-1].text == " v42"
        await async_llm.destroy_weights_update_group()
        with pytest.raises(RequestError, match="group_name: no group"):
            await async_llm.destroy_weights_update_group()
    assert (await async_llm.get_server_info())["weight_version"] == "sent"


async def test_cached_prefixes_are_dropped(async_llm: AsyncLLM) -> None:
    prompt = " ".join(f"k{i:02d} v{i:02d}" for i in range(60))
    cached = [(await collected(async_llm, prompt, max_tokens=1))[-1].num_cached_tokens for _ in range(2)]
    await async_llm.flush_cache()
    assert cached[1] > 0 and (await collected(async_llm, prompt, max_tokens=1))[-1].num_cached_tokens == 0


async def test_a_trainer_pauses_and_resumes(async_llm: AsyncLLM) -> None:
    await async_llm.pause("in_place")
    waiting = asyncio.create_task(collected(async_llm, PROMPT, max_tokens=1, temperature=0))
    async with asyncio.timeout(PATIENCE_S):
        while not await running(async_llm):
            await asyncio.sleep(0.02)
    assert not waiting.done()
    await async_llm.resume()
    assert (await asyncio.wait_for(waiting, PATIENCE_S))[-1].text == " v42"
