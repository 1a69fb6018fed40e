"""The text of one sample, as its tokens come: `TokenOutput` in, `TextOutput` out. Pure.

It runs in the frontend: a process of its own costs more than the text (docs/reports/benchmarks.md).
"""

import logging

import msgspec

from engine.messages import GenerateRequest, TokenLogprob, TokenOutput
from engine.text.incremental import RequestText
from engine.text.tokenizer import Tokenizer
from service.telemetry.logs import about

log = logging.getLogger(__name__)

PROMPT_TAIL_TOKENS = 8  # what incremental detokenization needs to see of the prompt


class TextOutput(msgspec.Struct, kw_only=True):
    """`TokenOutput` with its new, final text. `logprob_texts` run parallel to `tokens.logprobs`: text of the chosen token
    and of each alternative (`top`, then `requested`). `input_logprob_texts` likewise."""

    text: str
    tokens: TokenOutput
    logprob_texts: list[tuple[str, list[str]]] = []
    input_logprob_texts: list[tuple[str, list[str]]] = []


class SampleText:
    """Follows one sample from its request to its end."""

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        sampling = request.sampling
        self._token_text = tokenizer.token_text
        self._text = RequestText(
            tokenizer,
            prompt_tail=request.input_ids[-PROMPT_TAIL_TOKENS:],
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            stop_regex=sampling.stop_regex,
            no_stop_trim=sampling.no_stop_trim,
        )

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(
            text=self._push(output),
            tokens=output,
            logprob_texts=[self._texts(lp) for lp in output.logprobs],
            input_logprob_texts=[self._texts(lp) for lp in output.input_logprobs],
        )

    def _push(self, output: TokenOutput) -> str:
        try:
            return self._text.push(output.new_ids, output.finish if output.ends else None)
        except (OverflowError, ValueError) as e:  # an impossible id must fail this sample only
            rid = output.rid
            log.error("request %s: cannot decode %s: %s", rid, output.new_ids[:8], e, extra=about(rid=rid))
            return ""

    def _texts(self, lp: TokenLogprob) -> tuple[str, list[str]]:
        text = self._token_text
        return text(lp.token_id), [text(token_id) for _, token_id in [*lp.top, *lp.requested]]


class SampleIds:
    """Follows one sample on a worker without a tokenizer: all its texts are empty."""

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(
            text="",
            tokens=output,
            logprob_texts=list(map(_no_texts, output.logprobs)),
            input_logprob_texts=list(map(_no_texts, output.input_logprobs)),
        )


def _no_texts(lp: TokenLogprob) -> tuple[str, list[str]]:
    return "", [""] * (len(lp.top) + len(lp.requested))
