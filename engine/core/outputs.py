"""Outputs from a request's state."""

from dataclasses import dataclass, field

from engine.core.lanes import Lane
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.messages import FinishReason, GenerateRequest, TokenLogprob, TokenOutput


@dataclass(slots=True)
class StepEffects:
    """Effects of a step: outputs, requests with a finished chunk, and with complete prefill.

    `prefilled` has samples and deferred outputs. The caller aborts the `lost` requests of a failed
    step.
    """

    outputs: list[TokenOutput] = field(default_factory=list)
    progressed: list[Request] = field(default_factory=list)
    prefilled: list[tuple[Request, TokenOutput, ItemResult]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failure: str = ""
    lane: Lane | None = None


def output_of(request: Request, new_ids: list[int]) -> TokenOutput:
    unsent = request.unsent
    logprobs, unsent.logprobs = unsent.logprobs, []
    hidden, unsent.hidden = unsent.hidden, []
    input_hidden, unsent.input_hidden = unsent.input_hidden, b""
    aborted = request.finish is not None and request.finish.kind == "abort"
    return TokenOutput(
        rid=request.rid,
        new_ids=new_ids,
        finish=request.finish,
        prompt_tokens=len(request.input_ids),
        cached_tokens=min(request.cached_tokens, len(request.input_ids)),
        completion_tokens=len(request.output_ids),
        logprobs=logprobs,
        input_logprobs=_input_logprobs_once(request),
        retractions=request.retractions,
        preemptions=request.preemptions,
        input_hidden=b"" if aborted else input_hidden,  # perhaps incomplete
        hidden=hidden,
        cached_by_tier=request.cached_by_tier,
        transfer_retries=request.transfer_retries,
        drafts=request.drafts.counts() if request.drafts.steps else None,
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
    """Return (logprob_from, logprob_next) for [start, end): logits at i predict i+1."""
    prompt = len(request.input_ids)
    if not request.wants_input_logprobs or start >= prompt:
        return None, None
    assert request.logprobs is not None
    first, last = max(request.logprobs.start_len, start + 1), min(end, prompt - 1)
    if first > last:
        return None, None
    return first, request.input_ids[end] if end < prompt else None


def _input_logprobs_once(request: Request) -> list[TokenLogprob]:
    if request.input_logprobs_sent or request.logprobs is None or request.logprobs.start_len < 0:
        return []
    request.input_logprobs_sent = True
    first = [TokenLogprob(None, request.input_ids[0])] if request.logprobs.start_len == 0 else []
    return first + request.unsent.input_logprobs
