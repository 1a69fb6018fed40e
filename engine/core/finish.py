"""When a request ends: all checks, in one place, in one order.

1 already finished   2 marked to end (abort)   3 length   4 grammar ended   5 stop token or EOS
6 NaN logits or a token outside the vocabulary   7 stop string or regex
"""

from collections.abc import Callable, Sequence

from engine.core.request import Request
from engine.messages import FinishReason

# (token ids, skip special tokens) -> texts that may hold a stop
TailTexts = Callable[[Sequence[int], bool], Sequence[str]]

NAN_MESSAGE = "the model returned NaN logits for this request"
SPARE_TAIL_TOKENS = 8  # tokens whose text may be empty or half a character
NEWEST_TOKEN_CHARS = 128  # text that the last token may add


def check_finish(
    request: Request, *, bad: bool, tail_texts: TailTexts, vocab_size: int | None = None
) -> FinishReason | None:
    """Return why `request` ends after the last of its `output_ids`, or None.

    `vocab_size`: a sample of any other token ends the request; None: all are valid.
    """
    if request.finish is not None:
        return request.finish
    if request.abort is not None:
        return request.abort
    if len(request.output_ids) >= request.max_new_tokens:
        return FinishReason(kind="length")
    if request.grammar is not None and request.grammar.ended:
        return _grammar_end(request)
    if reason := _stop_token(request):
        return reason
    if bad:
        return FinishReason(kind="abort", message=NAN_MESSAGE, status=500)
    if reason := _outside(request, vocab_size):
        return reason
    if not request.sampling.stop and not request.stop_patterns:
        return None
    return _stop_string(request, tail_texts) or _stop_regex(request, tail_texts)


def _grammar_end(request: Request) -> FinishReason:
    """Report the end token where one was sampled; most grammars just end."""
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


def _outside(request: Request, vocab_size: int | None) -> FinishReason | None:
    last = request.output_ids[-1] if request.output_ids else 0
    if last >= 0 and (vocab_size is None or last < vocab_size):
        return None
    message = f"the model sampled token {last}, which is not in its vocabulary of {vocab_size}"
    return FinishReason(kind="abort", message=message, status=500)


def _stop_string(request: Request, tail_texts: TailTexts) -> FinishReason | None:
    sampling = request.sampling
    if not sampling.stop or not request.output_ids or len(request.output_ids) < sampling.min_new_tokens:
        return None
    window = max(map(len, sampling.stop)) + SPARE_TAIL_TOKENS
    texts = tail_texts(request.output_ids[-window:], sampling.skip_special_tokens)
    found = next((stop for stop in sampling.stop if any(stop in text for text in texts)), None)
    return None if found is None else FinishReason(kind="stop", matched=found)


def _stop_regex(request: Request, tail_texts: TailTexts) -> FinishReason | None:
    """Search the newest token's text and the `reach` characters before it."""
    patterns = request.stop_patterns
    if not patterns or not request.output_ids or len(request.output_ids) < request.sampling.min_new_tokens:
        return None
    reach = max(p.reach for p in patterns)
    window = reach + SPARE_TAIL_TOKENS
    texts = tail_texts(request.output_ids[-window:], request.sampling.skip_special_tokens)
    first = 1 if len(request.output_ids) > window else 0  # not the answer's beginning: a character of context
    for pattern in patterns:
        if any(pattern.found(text, max(first, len(text) - reach - NEWEST_TOKEN_CHARS)) for text in texts):
            return FinishReason(kind="stop", matched=pattern.pattern, regex=True)
    return None
