"""A frontend that is behind: it finds several batches of tokens in its socket, and reads them as one. Real sockets; the text is the same."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.ipc import IpcPaths, PullSocket, PushSocket
from engine.messages import (
    MOVED,
    ControlReply,
    FinishReason,
    GenerateRequest,
    KVSource,
    LogprobOptions,
    SchedulerReady,
    ToFrontend,
    TokenBatch,
    TokenLogprob,
    TokenOutput,
    joined,
)
from engine.sampling_params import SamplingParams
from engine.text.incremental import SampleText
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer
from tests.frontend.conftest import byte_tokenizer
from tests.frontend.test_rank_loads import NoFigures

TEXT = "Grüße: täglich 漢字 und 🙂 bis zum STOP"
SOURCE = KVSource("10.0.0.1:5000", "d0")


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[IpcPaths]:
    made = IpcPaths.create(str(tmp_path))
    yield made
    made.remove()


class Frontend:
    """`reads`: outputs that became text, by sample."""

    def __init__(self, paths: IpcPaths, tokenizer: Tokenizer) -> None:
        self.reads: Counter[str] = Counter()
        self._tokenizer = tokenizer
        link = SchedulerLink(lambda message: None, asyncio.get_running_loop().time)
        self.client = EngineClient(
            Leaders([link]),
            open_text=self._opened,
            observer=NoFigures(),
            limits=ClientLimits(max_running=8, max_queued=0),
        )
        self.client.on_message(SchedulerReady({}))
        self.pull: PullSocket[ToFrontend] = PullSocket(paths.to_frontend, ToFrontend, join=joined)
        self.pull.attach(asyncio.get_running_loop(), self.client.on_message)

    def _opened(self, request: GenerateRequest) -> Any:
        reader, reads = SampleText(self._tokenizer, request), self.reads

        class Counted:
            def read(self, output: TokenOutput) -> TextOutput:
                reads[request.rid] += 1
                return reader.read(output)

        return Counted()


def requests_of(ids: list[int]) -> list[GenerateRequest]:
    sampling = SamplingParams(max_new_tokens=99, seed=1)
    stops = SamplingParams(max_new_tokens=99, seed=1, stop=("STOP",))
    return [
        GenerateRequest(rid="plain", input_ids=ids, sampling=sampling),
        GenerateRequest(rid="logprobs", input_ids=ids, sampling=sampling, logprobs=LogprobOptions(top_num=1)),
        GenerateRequest(rid="stops", input_ids=ids, sampling=stops),
        GenerateRequest(rid="moves", input_ids=ids, sampling=sampling),
    ]


ENDS = {
    "plain": FinishReason(kind="length"),
    "logprobs": FinishReason(kind="length"),
    "stops": FinishReason(kind="stop", matched="STOP", trim=4),
    "moves": FinishReason(kind=MOVED),
}


def batches(wire: dict[str, str], ids: list[int]) -> Iterator[ToFrontend]:
    """A token of each request a step, beside a sample that has gone and, once, another message."""
    for step, token in enumerate(ids):
        last = step == len(ids) - 1
        outputs = [TokenOutput(rid="gone", new_ids=[3])]
        for name, rid in wire.items():
            output = TokenOutput(rid=rid, new_ids=[token], completion_tokens=step + 1, prompt_tokens=len(ids))
            output.finish = ENDS[name] if last else None
            output.source = SOURCE if last and name == "moves" else None
            output.times = {f"step {step}": 1.0} if step in (0, len(ids) - 1) else {}
            if name == "logprobs":
                output.logprobs = [TokenLogprob(-0.5 * step, token, [(-1.0, 5)])]
            outputs.append(output)
        yield TokenBatch(outputs)
        if step == len(ids) // 2:
            yield ControlReply("c", True, "")


async def answers_of(
    paths: IpcPaths, tokenizer: Tokenizer, *, behind: bool
) -> tuple[dict[str, TextOutput], Counter[str], dict[str, Any]]:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    frontend, push = Frontend(paths, tokenizer), PushSocket(paths.to_frontend)
    generations = {r.rid: frontend.client.generate([r]) for r in requests_of(ids)}
    wire = {name: generation.samples[0].wire_rid for name, generation in generations.items()}
    for number, message in enumerate(batches(wire, ids), 1):
        push.send(message)
        async with asyncio.timeout(20):
            while not behind and sum(frontend.reads.values()) < len(wire) * (number - (number > len(ids) // 2 + 1)):
                await asyncio.sleep(0)
    answers = {name: (await asyncio.wait_for(one.collect(), 20))[0] for name, one in generations.items()}
    push.close()
    frontend.pull.close()
    return answers, frontend.reads, {name: one.moved for name, one in generations.items()}


async def test_several_tokens_of_a_request_are_read_as_one(paths: IpcPaths) -> None:
    answers, reads, moved = await answers_of(paths, byte_tokenizer(), behind=False)
    late_answers, late_reads, late_moved = await answers_of(paths, byte_tokenizer(), behind=True)
    assert answers["plain"].text == TEXT and answers["stops"].text == TEXT.removesuffix("STOP")
    assert moved["moves"] == {0: SOURCE}
    assert (late_answers, late_moved) == (answers, moved)
    assert set(reads.values()) == {len(TEXT.encode())}
    assert set(late_reads.values()) == {2}, "a reply to a call keeps its place between tokens"


def test_what_came_alone_stays_as_it_is() -> None:
    reply, batch = ControlReply("c", True, ""), TokenBatch([TokenOutput(rid="a", new_ids=[1])])
    assert joined([reply]) == [reply] and joined([batch, reply, batch]) == [batch, reply, batch]
    assert joined([]) == []
