"""OpenAI's answers: chunks, bodies, usage; text completions with logprobs. Pure."""

import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.frontend.apis.shared.body_reader import COMPLETION, BodyReader
from engine.frontend.apis.shared.request import RequestFields, check_range, check_request
from engine.frontend.apis.shared.samples import Counts, Usage
from engine.frontend.apis.shared.stream import finite
from engine.messages import TokenLogprob
from engine.text.incremental import Span
from engine.text.sample import TextOutput
from service.http.errors import bad_field

# ---- Optional fields of a choice: token ids (vLLM, SGLang), last hidden state (SGLang). Pure.


class Extras:
    """In a stream, ids come with the next text, hidden states last."""

    def __init__(self, body: RequestFields, prompts: Sequence[list[int]]) -> None:
        self._token_ids = bool(body.return_token_ids)
        self._hidden_states = bool(body.return_hidden_states)
        self._prompts: dict[int, list[int]] = dict(enumerate(prompts))  # not shown yet
        self._new: defaultdict[int, list[int]] = defaultdict(list)  # tokens not shown yet
        self._last: dict[int, bytes] = {}

    def add(self, index: int, output: TextOutput) -> None:
        self._new[index] += output.tokens.new_ids
        if output.tokens.hidden:
            self._last[index] = output.tokens.hidden[-1]

    def take(self, index: int, *, finished: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._token_ids:
            shown["token_ids"] = self._new.pop(index, [])
            if index in self._prompts:
                shown["prompt_token_ids"] = self._prompts.pop(index)
        if self._hidden_states and finished:
            shown["hidden_states"] = array.array("f", self._last.pop(index, b"")).tolist()
        return shown


# ---- Body of /v1/completions, and its checks. Pure.

MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16


class CompletionBody(RequestFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


READER = BodyReader(body=CompletionBody, refused=COMPLETION, looked_into=("stream_options", "response_format"))


def check_completion(body: CompletionBody) -> None:
    check_request(body)
    check_range("logprobs", body.logprobs, MAX_COMPLETION_LOGPROBS)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field(
            "best_of",
            "must equal n: this server returns every sample, and sampling more to keep the best is not supported",
        )


# ---- view


def usage_of(counts: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        "reasoning_tokens": counts.reasoning,
    }


class OpenAIView:
    """Base of chat and completion views. `prompts`: by sample, for `return_token_ids`."""

    object: str
    chunk_object: str

    def __init__(
        self,
        body: RequestFields,
        *,
        weight_version: Callable[[], str],
        id: str,
        model: str,
        created: int,
        usage: Usage,
        prompts: Sequence[list[int]] = (),
    ) -> None:
        self._request = body
        wanted = body.return_token_ids or body.return_hidden_states
        self._extras = Extras(body, prompts) if wanted else None
        self._weight_version = weight_version
        self._head = {"id": id, "created": created, "model": model}
        self._usage = usage

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        for index, output in enumerate(answers):
            self._usage.add(index, output)
        choices = [self._choice(index, output) for index, output in enumerate(answers)]
        if self._extras is not None:
            for choice, output in zip(choices, answers, strict=True):
                self._extras.add(choice["index"], output)
                choice |= self._extras.take(choice["index"], finished=True)
        return {
            **self._head,
            "object": self.object,
            "choices": choices,
            "usage": usage_of(self._usage.total()),
            "metadata": {"weight_version": self._weight_version()},
        }

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        self._usage.add(index, output)
        deltas = self._deltas(index, output)
        if self._extras is not None:
            self._extras.add(index, output)
            if deltas:
                self._attach(deltas[-1], self._extras.take(index, finished=output.tokens.finish is not None))
        return [self._chunk(index, delta) for delta in deltas]

    def last(self) -> list[dict[str, Any]]:
        if not self._request.include_usage:
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": usage_of(self._usage.total())}]

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = usage_of(self._usage.of_sample(index))
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _attach(self, choice: dict[str, Any], extras: dict[str, Any]) -> None:
        choice.update(extras)

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        raise NotImplementedError


class Echo(NamedTuple):
    """A prompt's text and its tokens' places."""

    text: str = ""
    spans: Sequence[Span] = ()


class CompletionView(OpenAIView):
    """Answer to one completion. `echoes`: by sample. `has_text`: false for chunks without text."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, *, echoes: list[Echo], has_text: bool, **head: Any) -> None:
        super().__init__(body, **head)
        self._has_text = has_text
        self._logprobs = body.logprobs is not None
        self._echoes = echoes
        self._begun: set[int] = set()

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        text = self._echoes[index].text + output.text
        return {"index": index, "text": text, "logprobs": self._logprobs_of(index, output), **ending_of(output)}

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        text = output.text if index in self._begun else self._echoes[index].text + output.text
        logprobs = self._logprobs_of(index, output)
        self._begun.add(index)
        finished = output.tokens.finish is not None
        if self._has_text and not text and not finished and not (logprobs and logprobs["tokens"]):
            return []
        ending = ending_of(output) if finished else {"finish_reason": None, "matched_stop": None}
        return [{"index": index, "text": text, "logprobs": logprobs, **ending}]

    def _logprobs_of(self, index: int, output: TextOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        table, echo, tokens = _Columns(), self._echoes[index], output.tokens
        for lp, (text, top), (begin, end) in zip(
            tokens.input_logprobs, output.input_logprob_texts, echo.spans, strict=False
        ):
            table.add(lp, _as_it_stands(text, echo.text[begin:end]), top, begin)
        for lp, (text, top), (begin, _) in zip(
            tokens.logprobs, output.logprob_texts, output.logprob_spans, strict=False
        ):
            table.add(lp, text, top, len(echo.text) + begin)
        return table.columns


class _Columns:
    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, lp: TokenLogprob, text: str, top: list[str], offset: int) -> None:
        self.columns["tokens"].append(text)
        self.columns["token_logprobs"].append(finite(lp.logprob))
        self.columns["top_logprobs"].append(None if lp.logprob is None else _by_text(lp, text, top))
        self.columns["text_offset"].append(offset)


def _by_text(lp: TokenLogprob, text: str, top: list[str]) -> dict[str, float | None]:
    """Alternatives by text; duplicates (parts of characters) by id, in vLLM's form."""
    shown: dict[str, float | None] = {}
    for other, (logprob, token_id) in zip(top, lp.top, strict=False):
        is_taken = other in shown or other == text
        shown[f"token_id:{token_id}" if is_taken and token_id != lp.token_id else other] = finite(logprob)
    return {**shown, text: finite(lp.logprob)}


def _as_it_stands(text: str, seen: str) -> str:
    """The first token's text without the leading space it has elsewhere."""
    return seen if text == " " + seen else text


def ending_of(output: TextOutput) -> dict[str, Any]:
    finish = output.tokens.finish
    return {"finish_reason": finish.kind if finish else None, "matched_stop": finish.matched if finish else None}
