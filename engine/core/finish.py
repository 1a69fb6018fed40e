"""When a request ends: all checks, in one place, in one order.

1 already finished   2 marked to end (abort)   3 length   4 grammar ended   5 stop token or EOS   6 NaN logits   7 stop string
"""

from collections.abc import Callable, Sequence

from engine.core.request import Request
from engine.messages import FinishReason

TailText = Callable[[Sequence[int]], str]  # token ids -> their text

NAN_MESSAGE = "the model returned NaN logits for this request"
SPARE_TAIL_TOKENS = 8  # tokens whose text may be empty or half a character


def check_finish(request: Request, *, bad: bool, tail_text: TailText) -> FinishReason | None:
    """The reason why `request` ends after the last of its `output_ids`, or None. Changes nothing."""
    if request.finish is not None:
        return request.finish
    if request.abort is not None:
        return request.abort
    if len(request.output_ids) >= request.max_new_tokens:
        return FinishReason(kind="length")
    if reason := _grammar_end(request):
        return reason
    if reason := _stop_token(request):
        return reason
    if bad:
        return FinishReason(kind="abort", message=NAN_MESSAGE, status=500)
    return _stop_string(request, tail_text)


def _grammar_end(request: Request) -> FinishReason | None:
    """The end token is told, and cut from the text, where one was drawn; most grammars just have nothing more to say."""
    if request.grammar is None or not request.grammar.ended:
        return None
    last = request.output_ids[-1] if request.output_ids else None
    return FinishReason(kind="stop", matched=last if last in request.eos_ids else None)


def _stop_token(request: Request) -> FinishReason | None:
    sampling = request.sampling
    if not request.output_ids or len(request.output_ids) < sampling.min_new_tokens:
        return None
    last = request.output_ids[-1]
    if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in request.eos_ids):
        return FinishReason(kind="stop", matched=last)
    return None


def _stop_string(request: Request, tail_text: TailText) -> FinishReason | None:
    sampling = request.sampling
    if not sampling.stop or not request.output_ids or len(request.output_ids) < sampling.min_new_tokens:
        return None
    window = max(map(len, sampling.stop)) + SPARE_TAIL_TOKENS
    text = tail_text(request.output_ids[-window:])
    for stop in sampling.stop:
        if stop in text:
            return FinishReason(kind="stop", matched=stop)
    return None
