"""Results of calls. Names and shapes are vLLM's; shortcuts read a request's first sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.messages import FinishReason, TokenLogprob
from engine.text.sample import TextAnswers, TextOutput, ToolCall, WholeAnswer, joined
from tandem.params import WantedLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural logarithm of its probability.

    `rank`: 1 for the most likely token; None beyond the alternatives planned for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]  # by token id: the chosen token and its alternatives


@dataclass(slots=True)
class CompletionOutput:
    """One sample.

    `finish_reason`: "stop", "length", "tool_calls" or "abort"; null while it runs. `stop_reason`:
    the token id or text that stopped it. `delta`: the text since the result before, in a stream.
    `reasoning`, `tool_calls`: of a chat, as the model's format has them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    delta: str = ""


@dataclass(slots=True)
class RequestOutput:
    """A prompt's answer. `prompt`: None if it came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[Position | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def delta(self) -> str:
        return self.outputs[0].delta

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[Position] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's vector, float32 values."""

    embedding: list[float]
    prompt_token_ids: list[int]

    @property
    def outputs(self) -> "EmbeddingOutput":
        return self


@dataclass(slots=True)
class ScoringOutput:
    """A pair's relevance, or the probability of each label, 0 to 1; `score` is the first."""

    scores: list[float]
    prompt_token_ids: list[int]

    @property
    def score(self) -> float:
        return self.scores[0]

    @property
    def outputs(self) -> "ScoringOutput":
        return self


class ResultBuilder:
    """Builds a request's results from its outputs, in order. Pure.

    `head`: the result without samples. `answers`: finds reasoning and calls.
    """

    def __init__(self, head: RequestOutput, *, n: int, wanted: WantedLogprobs, answers: TextAnswers) -> None:
        self._head = head
        self._wanted = wanted
        self._answers = answers
        self._samples = [CompletionOutput(i) for i in range(n)]
        self._wholes = [WholeAnswer() for _ in range(n)]
        if wanted.answer is not None:
            for sample in self._samples:
                sample.logprobs, sample.cumulative_logprob = [], 0.0

    def add(self, index: int, output: TextOutput) -> None:
        """Add new tokens of the `index`-th sample."""
        sample, tokens = self._samples[index], output.tokens
        self._add_parts(sample, output)
        sample.token_ids += tokens.new_ids
        if sample.logprobs is not None:
            sample.logprobs += _positions(tokens.logprobs, output.logprob_texts, self._wanted.answer or 0)
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(
                p.logprob or 0.0 for p in tokens.logprobs
            )
        if self._wanted.prompt is not None and index == 0 and tokens.input_logprobs:
            found = _positions(tokens.input_logprobs, output.input_logprob_texts, self._wanted.prompt)
            self._head.prompt_logprobs = [*(self._head.prompt_logprobs or []), *(p or None for p in found)]
        if index == 0:
            self._head.num_cached_tokens = max(self._head.num_cached_tokens, tokens.cached_tokens)
        if tokens.finish is not None:
            self._finish(sample, tokens.finish)

    def result(self) -> RequestOutput:
        """A copy of what there is; the next one's `delta` begins after it."""
        shown = [
            replace(
                sample,
                token_ids=list(sample.token_ids),
                logprobs=None if sample.logprobs is None else list(sample.logprobs),
                tool_calls=[replace(call) for call in sample.tool_calls],
            )
            for sample in self._samples
        ]
        for sample in self._samples:
            sample.delta = ""
        return replace(self._head, outputs=shown, finished=all(sample.finish_reason for sample in shown))

    def _add_parts(self, sample: CompletionOutput, output: TextOutput) -> None:
        whole = joined(self._answers.read(sample.index, output), into=self._wholes[sample.index])
        sample.delta += whole.text[len(sample.text) :]
        sample.text, sample.reasoning, sample.tool_calls = whole.text, whole.reasoning or None, whole.calls

    def _finish(self, sample: CompletionOutput, finish: FinishReason) -> None:
        has_called = finish.kind == "stop" and self._answers.has_called(sample.index)
        sample.finish_reason = "tool_calls" if has_called else finish.kind
        sample.stop_reason = finish.matched


def _positions(
    logprobs: Sequence[TokenLogprob], texts: Sequence[tuple[str, list[str]]], num: int
) -> Iterator[Position]:
    """A dict for each token: `num` alternatives, and the chosen token. Empty without a logprob."""
    for one, (text, others) in zip(logprobs, texts, strict=False):
        if one.logprob is None:
            yield {}
            continue
        top = zip(one.top[:num], others, strict=False)
        found = {token_id: Logprob(value, rank, other) for rank, ((value, token_id), other) in enumerate(top, start=1)}
        found.setdefault(one.token_id, Logprob(one.logprob, None, text))
        yield found
