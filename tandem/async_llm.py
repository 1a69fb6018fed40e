"""`AsyncLLM`: a model for programs with an event loop; answers stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from engine.frontend.apis.admin.info import describe_server
from engine.frontend.services import Services
from tandem.errors import EngineDeadError
from tandem.llm import Conversation, LocalEngine, Prompts, listed, score_inputs
from tandem.outputs import EmbeddingOutput, RequestOutput, ScoringOutput
from tandem.params import SamplingLike, fields_of
from tandem.requests import (
    AnswerStream,
    PreparedRequest,
    Prompt,
    Slots,
    embedded,
    in_order,
    plan_conversation,
    plan_prompt,
    scored,
)

T = TypeVar("T")


class AsyncLLM(LocalEngine[Coroutine[Any, Any, None]]):
    """An `LLM` whose calls are awaited, with its arguments.

    The constructor returns at once; the model loads in another thread, and the first call, or
    `async with`, waits for it. Several event loops may share one.
    """

    def __init__(self, model: str = "", **flags: Any) -> None:
        super().__init__(model, flags)
        self._slots: Slots | None = None

    async def __aenter__(self) -> "AsyncLLM":
        await self._ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingLike = None, **params: Any
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt: `async for output in llm.generate(prompt, max_tokens=16)`.

        Each result has the answer so far, and its new text as `delta`; the last one is `finished`.
        A consumer that leaves the loop aborts the request. `rid="name"` names it for `abort`.
        Raises as `LLM.generate`.
        """
        fields = fields_of(sampling_params, params)
        async for output in self._streamed(lambda s: plan_prompt(s, prompt, fields, stream=True)):
            yield output

    async def chat(
        self, messages: Conversation, sampling_params: SamplingLike = None, **params: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, as `generate` does a prompt."""
        fields = fields_of(sampling_params, params)
        async for output in self._streamed(lambda s: plan_conversation(s, messages, fields, stream=True)):
            yield output

    async def embed(self, prompts: Prompts, **params: Any) -> list[EmbeddingOutput]:
        """Vectors of prompts, as `LLM.embed`."""
        fields, s = fields_of(None, params), await self._ready()
        return await self._all([partial(embedded, s, prompt, fields) for prompt in listed(prompts)])

    async def score(
        self,
        text_1: Prompts | None = None,
        text_2: Prompts | None = None,
        label_token_ids: Sequence[int] | None = None,
        **params: Any,
    ) -> list[ScoringOutput]:
        """Relevance of pairs, or probabilities of labels, as `LLM.score`."""
        fields, pairs = score_inputs(text_1, text_2, {**params, "label_token_ids": label_token_ids})
        s = await self._ready()
        return await self._all([partial(scored, s, pair, fields) for pair in pairs])

    async def get_server_info(self) -> dict[str, Any]:
        """Flags, limits and load, as `LLM.get_server_info`."""
        return await self._run(describe_server(await self._ready()))

    async def abort(self, rid: str) -> None:
        """End the request of this name early; its stream ends with the finish reason "abort"."""
        s = await self._ready()
        self._worker.post(lambda: s.client.abort(rid))

    async def _streamed(
        self, make_plan: Callable[[Services], Awaitable[PreparedRequest]]
    ) -> AsyncIterator[RequestOutput]:
        s, slots = await self._ready(), self._slots
        assert slots is not None, "ready"

        async def begin() -> AnswerStream:
            return AnswerStream(s, slots, await make_plan(s))

        stream = await self._run(begin())
        try:
            while (output := await self._run(stream.next())) is not None:
                yield output
        finally:
            self._worker.post(stream.leave)

    async def _all(self, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        assert self._slots is not None, "ready"
        return await self._run(in_order(self._slots, [(1, job) for job in jobs], on_done=lambda: None))

    async def _obey(self, order: Callable[[Services], Coroutine[Any, Any, object]]) -> None:
        await self._run(order(await self._ready()))

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = self._worker.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if (over := self._worker.over) is not None:
                raise EngineDeadError(str(over), code=over.code) from None
            raise

    async def _ready(self) -> Services:
        """Wait for the model. Raises ConfigError, EngineDeadError."""
        s = await asyncio.shield(asyncio.wrap_future(self._worker.started))
        if self._slots is None:
            self._slots = Slots(s)
        return s
