"""`LLM`: a model in Python, without a server. It batches by itself."""

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeVar, cast

from tqdm import tqdm  # type: ignore[import-untyped]

from disagg.processes.session_plan import SessionPlan
from disagg.processes.worker import plan_on_machine
from engine.frontend.apis.admin.info import describe_server
from engine.frontend.services import Services
from service.http.errors import ApiError
from tandem.errors import RequestError
from tandem.flags import parse_flags, python_names
from tandem.operations import EngineOperations
from tandem.outputs import EmbeddingOutput, RequestOutput, ScoringOutput
from tandem.params import SamplingLike, fields_of
from tandem.requests import (
    PreparedRequest,
    Prompt,
    Slots,
    answered,
    embedded,
    in_order,
    plan_conversation,
    plan_prompt,
    scored,
)
from tandem.worker import LocalWorker

R = TypeVar("R")
T = TypeVar("T")
Job = Callable[[], Awaitable[T]]
Prompts = Prompt | Sequence[Prompt]
Conversation = Sequence[Mapping[str, Any]]  # messages with role and content, as in /v1/chat/completions
MakePlan = Callable[[Services, Any, Mapping[str, Any]], Awaitable[PreparedRequest]]


class LocalEngine(EngineOperations[R]):
    """Base of `LLM` and `AsyncLLM`: a worker that ends with its object, or with the program."""

    def __init__(self, model: str, flags: Mapping[str, Any]) -> None:
        engine, server, disagg = parse_flags(model, flags)

        def make_plan() -> SessionPlan:
            with python_names():
                return plan_on_machine(engine=engine, server=server, disagg=disagg)

        self._worker = LocalWorker(make_plan)
        self._end = weakref.finalize(self, self._worker.close)

    def close(self) -> None:
        """End all processes; running calls fail. A second call does nothing."""
        self._end()


class LLM(LocalEngine[None]):
    """A model on this machine: `LLM("smollm2").generate("The capital of France is")`.

    `model`: what `--model-path` takes, by default the model that comes with Tandem. `flags`: those
    of `tandem serve`, with underscores: `tp_size=2`, `lora_paths={"poems": "/adapters/poems"}`;
    vLLM's and SGLang's names work. Returns when the model is ready. Raises ConfigError. Threads may
    share it. Use it as a context manager, or call `close`; it also ends with the program.
    """

    def __init__(self, model: str = "", **flags: Any) -> None:
        super().__init__(model, flags)
        try:
            self._services = self._worker.started.result()
            self._slots = Slots(self._services)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        *,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[RequestOutput]:
        """Continue prompts; return results in their order.

        `prompts`: one or several texts, or lists of token ids. `sampling_params`: for all, or one
        each; `params`: for all, by the names of `/v1/completions` (`max_tokens=16`), before the
        former. `lora_path`: a loaded adapter for all, or a list with one or None each. Raises
        RequestError, which names the argument, and EngineDeadError.
        """
        return self._answers(plan_prompt, listed(prompts), sampling_params, params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        *,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; return results in their order.

        `messages`: one or several lists of messages. `params`: by the names of
        `/v1/chat/completions`, `tools` and `chat_template_kwargs` among them. Raises as `generate`.
        """
        return self._answers(plan_conversation, conversations(messages), sampling_params, params, use_tqdm=use_tqdm)

    def embed(self, prompts: Prompts, *, use_tqdm: bool = True, **params: Any) -> list[EmbeddingOutput]:
        """Vectors of prompts, in their order. `params`: of `/v1/embeddings`.

        Raises as `generate`.
        """
        fields = fields_of(None, params)
        jobs = [partial(embedded, self._services, prompt, fields) for prompt in listed(prompts)]
        return self._run([(1, job) for job in jobs], use_tqdm=use_tqdm)

    def score(
        self,
        text_1: Prompts | None = None,
        text_2: Prompts | None = None,
        label_token_ids: Sequence[int] | None = None,
        *,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[ScoringOutput]:
        """Relevance of each `text_2` to `text_1` (one for all, or one each), as `/score` has it.

        With `label_token_ids`: the probabilities of these tokens behind both, as SGLang and
        `/v1/score` have them, also for token ids. `params`: of these routes (`apply_softmax`);
        SGLang's `query` and `items` name the texts, too. Raises as `generate`.
        """
        fields, pairs = score_inputs(text_1, text_2, {**params, "label_token_ids": label_token_ids})
        return self._run([(1, partial(scored, self._services, pair, fields)) for pair in pairs], use_tqdm=use_tqdm)

    def get_server_info(self) -> dict[str, Any]:
        """Flags, limits, load and `weight_version`, as GET /server_info has them."""
        return self._worker.run(describe_server(self._services))

    def _answers(
        self,
        make_plan: MakePlan,
        inputs: Sequence[Any],
        sampling_params: SamplingLike | Sequence[SamplingLike],
        params: Mapping[str, Any],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if not inputs:
            return []
        fields = each_fields(sampling_params, params, len(inputs))
        planned = self._worker.run(_plan_all(make_plan, self._services, inputs, fields))
        jobs = [(one.num_samples, partial(answered, self._services, one)) for one in planned]
        return self._run(jobs, use_tqdm=use_tqdm)

    def _run(self, jobs: Sequence[tuple[int, Job[T]]], *, use_tqdm: bool) -> list[T]:
        hidden = not use_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(jobs), unit="prompt", disable=hidden, dynamic_ncols=True) as bar:
            return self._worker.run(in_order(self._slots, jobs, on_done=bar.update))

    def _obey(self, order: Callable[[Services], Coroutine[Any, Any, object]]) -> None:
        self._worker.run(order(self._services))


def listed(prompts: Prompts) -> list[Prompt]:
    """One prompt, or several, as a list. Raises RequestError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        problem = f"must be a text, a list of token ids, or a list of prompts, got {type(prompts).__name__}"
        raise RequestError(f"prompts: {problem}", field="prompts")
    found = list(cast(Sequence[Prompt], prompts))
    return [cast(Prompt, found)] if found and isinstance(found[0], SupportsIndex) else found


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation, or several, as a list. Raises RequestError."""
    takes = isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping)
    found = list(messages) if takes else []
    if not takes or (found and isinstance(found[0], str)):
        got = "texts" if found else type(messages).__name__
        problem = f"must be a list of messages, each with role and content, or a list of such lists, got {got}"
        raise RequestError(f"messages: {problem}", field="messages")
    if found and isinstance(found[0], Mapping):
        return [cast(Conversation, found)]
    return cast(list[Conversation], found)


def score_inputs(
    text_1: Prompts | None, text_2: Prompts | None, params: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[Prompt, Prompt]]]:
    """Fields of a score's body, and its pairs. Raises RequestError."""
    fields = fields_of(None, params)
    first = _texts("text_1", text_1, fields.pop("query", None))
    second = _texts("text_2", text_2, fields.pop("items", None))
    if len(first) not in (1, len(second)):
        problem = f"has {len(first)} texts, text_2 has {len(second)}; give one, or as many"
        raise RequestError(f"text_1: {problem}", field="text_1")
    return fields, list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _texts(name: str, own: Prompts | None, other: Prompts | None) -> list[Prompt]:
    if (own is None) == (other is None):
        raise RequestError(f"{name}: " + ("is missing" if own is None else "is given by two names"), field=name)
    return listed(own if own is not None else cast(Prompts, other))


def each_fields(
    sampling_params: SamplingLike | Sequence[SamplingLike], params: Mapping[str, Any], count: int
) -> list[dict[str, Any]]:
    """A body's fields for each of `count` inputs. Raises RequestError."""
    adapters = params.get("lora_path")
    if not isinstance(adapters, list | tuple):
        if not isinstance(sampling_params, list | tuple):
            return [fields_of(sampling_params, params)] * count
        return [fields_of(one, params) for one in _one_each("sampling_params", sampling_params, count)]
    pairs = zip(
        _one_each("sampling_params", sampling_params, count), _one_each("lora_path", adapters, count), strict=True
    )
    return [fields_of(one, {**params, "lora_path": adapter}) for one, adapter in pairs]


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """Raises RequestError."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        problem = f"has {len(given)} entries for {count} prompts; give one for all, or one each"
        raise RequestError(f"{name}: {problem}", field=name)
    return list(given)


async def _plan_all(
    make_plan: MakePlan, s: Services, inputs: Sequence[Any], fields: Sequence[Mapping[str, Any]]
) -> list[PreparedRequest]:
    """Check all before any is sent. Raises ApiError, with the number of the wrong one."""
    found = []
    for number, (one, own) in enumerate(zip(inputs, fields, strict=True)):
        try:
            found.append(await make_plan(s, one, own))
            await asyncio.sleep(0)  # calls of other threads get in between
        except ApiError as error:
            if len(inputs) > 1:
                text = f"{error.message} (input {number + 1} of {len(inputs)})"
                raise ApiError(error.status, text, field=error.field, code=error.code) from None
            raise
    return found
