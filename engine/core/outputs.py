"""Outputs from a request's state."""

import array
import math
from dataclasses import dataclass, field

from engine.core.plan import ItemResult, Phase, PlanItem
from engine.core.policy import ALL_IDS
from engine.core.request import Request
from engine.messages import FinishReason, GenerateRequest, TokenLogprob, TokenOutput


@dataclass(slots=True)
class StepEffects:
    """Outputs, requests with a finished chunk, and those with complete prefill (deferred outputs).

    The caller aborts the `lost` requests of a failed step.
    """

    outputs: list[TokenOutput] = field(default_factory=list)
    progressed: list[Request] = field(default_factory=list)
    prefilled: list[tuple[Request, TokenOutput, ItemResult]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failure: str = ""
    phase: Phase | None = None


def output_of(request: Request, new_ids: list[int]) -> TokenOutput:
    unsent, stats = request.unsent, request.stats
    logprobs, unsent.logprobs = unsent.logprobs, []
    hidden, unsent.hidden = unsent.hidden, []
    input_hidden, unsent.input_hidden = unsent.input_hidden, b""
    aborted = request.finish is not None and request.finish.kind == "abort"
    return TokenOutput(
        rid=request.rid,
        new_ids=new_ids,
        finish=request.finish,
        prompt_tokens=len(request.input_ids),
        cached_tokens=min(stats.cached_tokens, len(request.input_ids)),
        completion_tokens=len(request.output_ids),
        logprobs=logprobs,
        input_logprobs=_input_logprobs_once(request),
        retractions=stats.retractions,
        preemptions=stats.preemptions,
        input_hidden=b"" if aborted else input_hidden,  # perhaps incomplete
        hidden=hidden,
        cached_by_tier=stats.cached_by_tier,
        transfer_retries=stats.transfer_retries,
        drafts=stats.drafts,
    )


def joined(held: TokenOutput, new: TokenOutput) -> TokenOutput:
    new.new_ids = held.new_ids + new.new_ids
    new.logprobs = held.logprobs + new.logprobs
    new.input_logprobs = held.input_logprobs + new.input_logprobs
    new.input_hidden = held.input_hidden + new.input_hidden
    new.hidden = held.hidden + new.hidden
    return new


def refused(request: Request | GenerateRequest, reason: FinishReason) -> TokenOutput:
    return TokenOutput(rid=request.rid, new_ids=[], finish=reason, prompt_tokens=len(request.input_ids))


def refusal(message: str, *, status: int) -> FinishReason:
    return FinishReason(kind="abort", message=message, status=status)


def input_logprob_part(request: Request, start: int, end: int) -> tuple[int | None, int | None]:
    """(logprob_from, logprob_next) for [start, end): logits at i predict i+1."""
    prompt = len(request.input_ids)
    if not request.wants_input_logprobs or start >= prompt:
        return None, None
    assert request.logprobs is not None
    first, last = max(request.logprobs.start_len, start + 1), min(end, prompt - 1)
    if first > last:
        return None, None
    return first, request.input_ids[end] if end < prompt else None


def _input_logprobs_once(request: Request) -> list[TokenLogprob]:
    if request.unsent.input_logprobs_sent or request.logprobs is None or request.logprobs.start_len < 0:
        return []
    request.unsent.input_logprobs_sent = True
    first = [TokenLogprob(None, request.input_ids[0])] if request.logprobs.start_len == 0 else []
    return first + request.unsent.input_logprobs


NAN_MESSAGE = "the model returned NaN logits for this request"


def check_finish(request: Request, *, bad: bool, vocab_size: int = ALL_IDS) -> FinishReason | None:
    """The finish reason after the last token, or None.

    Sampled ids from `vocab_size` on end the request. Order of the checks:

    1 finished   2 aborted   3 no token: NaN logits, or an unknown id   4 length   5 grammar ended
    6 stop token or EOS   7 stop string or regex, also at the length's end: clients never see one
    """
    if request.finish is not None:
        return request.finish
    if request.abort is not None:
        return request.abort
    if reason := _no_token(request, bad=bad, vocab_size=vocab_size):
        return reason
    if len(request.output_ids) >= request.max_new_tokens:
        found = None if request.prefill_only else _stop_text(request)
        return found or FinishReason(kind="length")
    if request.grammar is not None and request.grammar.ended:
        last = request.output_ids[-1] if request.output_ids else None
        return FinishReason(kind="stop", matched=last if last in request.eos_ids else None)
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


# ---- Hidden states returned by steps: float32 rows, once per position and in order.


def unseen_from(request: Request) -> int:
    """First position that must be computed for its hidden state, or `num_tokens`."""
    if request.message.return_hidden_states or request.message.pooling == "mean":
        return request.unsent.hidden_launched
    return request.num_tokens


def note_launch(request: Request, start: int, end: int) -> int | None:
    message, unsent = request.message, request.unsent
    if not message.return_hidden_states and not message.pooling:
        return None
    first, unsent.hidden_launched = max(start, unsent.hidden_launched), max(end, unsent.hidden_launched)
    if message.pooling in ("last", "labels") and end < request.num_tokens:
        return None
    return first if first < end else None


def take(request: Request, item: PlanItem, rows: bytes) -> None:
    assert item.hidden_from is not None
    if request.message.pooling:
        request.unsent.hidden = [_pooled(request, rows)] if item.sample else [_sum(request.unsent.hidden, rows)]
        return
    row_bytes = len(rows) // (item.kv_len - item.hidden_from)
    split = max(0, len(request.input_ids) - item.hidden_from) * row_bytes
    request.unsent.input_hidden += rows[:split]
    request.unsent.hidden += [rows[at : at + row_bytes] for at in range(split, len(rows), row_bytes)]


def _pooled(request: Request, rows: bytes) -> bytes:
    """Unit length by default, as in SGLang and OpenAI; label logits stay."""
    if request.message.pooling == "labels":
        return rows
    vector = array.array("f", _sum(request.unsent.hidden, rows))
    if request.message.unit:
        divisor = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    else:
        divisor = len(request.input_ids) if request.message.pooling == "mean" else 1
    return array.array("f", [x / divisor for x in vector]).tobytes()


def _sum(before: list[bytes], rows: bytes) -> bytes:
    if not before:
        return rows
    return array.array("f", map(float.__add__, array.array("f", before[0]), array.array("f", rows))).tobytes()
