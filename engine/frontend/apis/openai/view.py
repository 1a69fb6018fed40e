"""OpenAI's answers: chunks, bodies, logprobs. Pure, apart from the tokenizer's exact token bytes."""

from typing import Any

from engine.frontend.apis.openai.bodies import ChatBody, CompletionBody, OpenAIFields
from engine.frontend.apis.shared.stream import finite
from engine.messages import TokenLogprob
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer


class Usage:
    """`num_prompt_tokens`: of each prompt. Samples are prompt-major, `n` for each; a prompt counts once."""

    def __init__(self, num_prompt_tokens: list[int], *, n: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._completion = [0] * (len(num_prompt_tokens) * n)
        self._cached = [0] * len(num_prompt_tokens)

    def add(self, index: int, output: TextOutput) -> None:
        self._completion[index] += len(output.tokens.new_ids)
        if index % self._n == 0:  # later samples of a prompt find the first one's pages: that saves the user nothing
            prompt = index // self._n
            self._cached[prompt] = max(self._cached[prompt], output.tokens.cached_tokens)

    def of_sample(self, index: int) -> dict[str, Any]:
        prompt = index // self._n
        return _usage(self._num_prompt_tokens[prompt], self._completion[index], self._cached[prompt])

    def total(self) -> dict[str, Any]:
        return _usage(sum(self._num_prompt_tokens), sum(self._completion), sum(self._cached))


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


class OpenAIView:
    """What chat and completions share. Subclasses show a whole sample (`_choice`) and choices of new chunks (`_deltas`)."""

    object: str
    chunk_object: str

    def __init__(self, body: OpenAIFields, *, id: str, model: str, created: int, usage: Usage) -> None:
        self._request = body
        self._head = {"id": id, "created": created, "model": model}
        self._usage = usage

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        for index, output in enumerate(answers):
            self._usage.add(index, output)
        choices = [self._choice(index, output) for index, output in enumerate(answers)]
        return {**self._head, "object": self.object, "choices": choices, "usage": self._usage.total()}

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        self._usage.add(index, output)
        return [self._chunk(index, delta) for delta in self._deltas(index, output)]

    def last(self) -> list[dict[str, Any]]:
        if not self._request.include_usage:
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage.total()}]

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = self._usage.of_sample(index)
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatView(OpenAIView):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, *, tokenizer: Tokenizer, **head: Any) -> None:
        super().__init__(body, **head)
        self._logprobs = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs_of(output), **_ending(output)}

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        deltas = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append(delta_of(index, {"role": "assistant", "content": ""}))
        if output.text or output.logprob_texts:
            deltas.append(delta_of(index, {"content": output.text}, logprobs=self._logprobs_of(output)))
        if output.tokens.finish is not None:
            deltas.append({**delta_of(index, {}), **_ending(output)})
        return deltas

    def _logprobs_of(self, output: TextOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        pairs = zip(output.tokens.logprobs, output.logprob_texts, strict=False)
        return {"content": [self._token(lp, text, top) for lp, (text, top) in pairs], "refusal": None}

    def _token(self, lp: TokenLogprob, text: str, top_texts: list[str]) -> dict[str, Any]:
        top = [self._entry(t, i, p) for t, (p, i) in zip(top_texts, lp.top, strict=False)]
        return {**self._entry(text, lp.token_id, lp.logprob), "top_logprobs": top}

    def _entry(self, text: str, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(token_id))}


class CompletionView(OpenAIView):
    """`echoes`: the prompt text before each sample ("" without echo)."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, *, echoes: list[str], **head: Any) -> None:
        super().__init__(body, **head)
        self._logprobs = body.logprobs is not None
        self._echoes = echoes
        self._begun: set[int] = set()
        self._offsets = [0] * len(echoes)  # in the text, of the next token of each sample

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        text = self._echoes[index] + output.text
        return {"index": index, "text": text, "logprobs": self._logprobs_of(index, output), **_ending(output)}

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        text = output.text if index in self._begun else self._echoes[index] + output.text
        logprobs = self._logprobs_of(index, output)
        self._begun.add(index)
        finished = output.tokens.finish is not None
        if not text and not finished and not (logprobs and logprobs["tokens"]):
            return []
        ending = _ending(output) if finished else {"finish_reason": None, "matched_stop": None}
        return [{"index": index, "text": text, "logprobs": logprobs, **ending}]

    def _logprobs_of(self, index: int, output: TextOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        table = _Columns(self._offsets[index])
        for i, (lp, texts) in enumerate(zip(output.tokens.input_logprobs, output.input_logprob_texts, strict=False)):
            table.add(lp, _first_text(texts, self._echoes[index]) if i == 0 else texts)
        if index not in self._begun:
            table.offset = max(table.offset, len(self._echoes[index]))
        for lp, texts in zip(output.tokens.logprobs, output.logprob_texts, strict=False):
            table.add(lp, texts)
        self._offsets[index] = table.offset
        return table.columns


class _Columns:
    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, lp: TokenLogprob, texts: tuple[str, list[str]]) -> None:
        text, top_texts = texts
        top = {t: finite(p) for t, (p, _) in zip(top_texts, lp.top, strict=False)}
        self.columns["tokens"].append(text)
        self.columns["token_logprobs"].append(finite(lp.logprob))
        self.columns["top_logprobs"].append(None if lp.logprob is None else {**top, text: finite(lp.logprob)})
        self.columns["text_offset"].append(self.offset)
        self.offset += len(text)


def _first_text(texts: tuple[str, list[str]], prompt: str) -> tuple[str, list[str]]:
    """The first token of a text has no leading space, though the same token has one elsewhere."""
    text, top = texts
    return (text[1:] if text.startswith(" ") and not prompt.startswith(" ") else text), top


def _ending(output: TextOutput) -> dict[str, Any]:
    finish = output.tokens.finish
    return {"finish_reason": finish.kind if finish else None, "matched_stop": finish.matched if finish else None}


def delta_of(index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}
