"""Text of one sample: `TokenOutput` to `TextOutput`.

It runs in the frontend: a process of its own costs more (docs/reports/benchmarks.md).
"""

import logging
from collections.abc import Callable
from functools import partial

from engine.messages import GenerateRequest, TokenLogprob, TokenOutput
from engine.text.incremental import IncrementalText, RequestText, tail_of
from engine.text.sample import Span, TextOutput
from engine.text.tokenizer import Tokenizer
from service.telemetry.context import about

log = logging.getLogger(__name__)


class SampleText:
    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        self._token_text = tokenizer.token_text
        skips, tail = request.sampling.skip_special_tokens, tail_of(request.input_ids)
        self._opening: IncrementalText | None = None  # until the first token, which may lose its leading space
        if request.logprobs is not None and not tokenizer.byte_level:
            self._opening = IncrementalText(tokenizer, prompt_remainder=tail, skip_special_tokens=skips)
        self._text = RequestText(tokenizer, request.sampling, prompt_remainder=tail)

    def read(self, output: TokenOutput) -> TextOutput:
        text, spans = self._push(output)
        return TextOutput(
            text=text,
            tokens=output,
            logprob_texts=self._output_texts(output.logprobs),
            logprob_spans=spans,
            input_logprob_texts=[_texts(lp, self._token_text) for lp in output.input_logprobs],
        )

    def _push(self, output: TokenOutput) -> tuple[str, list[Span]]:
        finish = output.finish if output.ends else None
        try:
            if output.logprobs:
                return self._text.push_each(output.new_ids, finish)
            return self._text.push(output.new_ids, finish), []
        except (OverflowError, ValueError) as e:  # an invalid id must fail only this sample
            rid = output.rid
            log.error("request %s: cannot decode %s: %s", rid, output.new_ids[:8], e, extra=about(rid=rid))
            return "", []

    def _output_texts(self, logprobs: list[TokenLogprob]) -> list[tuple[str, list[str]]]:
        texts = [_texts(lp, self._token_text) for lp in logprobs]
        if texts and self._opening is not None:
            texts[0] = _texts(logprobs[0], self._first_text)
            self._opening = None
        return texts

    def _first_text(self, token_id: int) -> str:
        text = self._token_text(token_id)
        if self._opening is None or not text.startswith(" "):
            return text
        return text[1:] if self._opening.fork().push([token_id]) == text[1:] else text


class SampleIds:
    """A sample without tokenizer: texts are empty."""

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(
            text="",
            tokens=output,
            logprob_texts=list(map(_no_texts, output.logprobs)),
            input_logprob_texts=list(map(_no_texts, output.input_logprobs)),
        )


def _texts(lp: TokenLogprob, text: Callable[[int], str]) -> tuple[str, list[str]]:
    return text(lp.token_id), [text(token_id) for _, token_id in [*lp.top, *lp.requested]]


def _no_texts(lp: TokenLogprob) -> tuple[str, list[str]]:
    return "", [""] * (len(lp.top) + len(lp.requested))


def open_text(tokenizer: Tokenizer | None) -> Callable[[GenerateRequest], SampleText | SampleIds]:
    """Make readers of samples' outputs."""
    return (lambda request: SampleIds()) if tokenizer is None else partial(SampleText, tokenizer)
