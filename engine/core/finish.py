"""Finish checks of a request, in one order.

1 finished   2 aborted   3 no token: NaN logits, or an unknown id   4 length   5 grammar ended
6 stop token or EOS   7 stop string or regex, also at the length's end: clients never see one
"""

from engine.core.limits import ALL_IDS
from engine.core.request import Request
from engine.messages import FinishReason

NAN_MESSAGE = "the model returned NaN logits for this request"


def check_finish(request: Request, *, bad: bool, vocab_size: int = ALL_IDS) -> FinishReason | None:
    """Return the finish reason after the last token, or None.

    Sampled ids from `vocab_size` on end the request.
    """
    if request.finish is not None:
        return request.finish
    if request.abort is not None:
        return request.abort
    if reason := _no_token(request, bad=bad, vocab_size=vocab_size):
        return reason
    if len(request.output_ids) >= request.max_new_tokens:
        return _at_limit(request)
    if request.grammar is not None and request.grammar.ended:
        return _grammar_end(request)
    return _stop_token(request) or _stop_text(request)


def _no_token(request: Request, *, bad: bool, vocab_size: int) -> FinishReason | None:
    if request.prefill_only:
        return None
    if bad:
        return FinishReason(kind="abort", message=NAN_MESSAGE, status=500, own=True)
    last = request.output_ids[-1] if request.output_ids else 0
    if 0 <= last < vocab_size:
        return None
    message = f"the model sampled token {last}, which is not in its vocabulary of {vocab_size}"
    return FinishReason(kind="abort", message=message, status=500, own=True)


def _at_limit(request: Request) -> FinishReason:
    found = None if request.prefill_only else _stop_text(request)
    return found or FinishReason(kind="length")


def _grammar_end(request: Request) -> FinishReason:
    """Report a sampled end token; most grammars just end."""
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


def _stop_text(request: Request) -> FinishReason | None:
    if request.stops is None or len(request.output_ids) < request.sampling.min_new_tokens:
        return None
    return request.stops.look(request.output_ids)
