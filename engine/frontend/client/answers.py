"""Outputs of one sample put together: what every API's answer is made from. Pure."""

from engine.messages import FinishReason
from engine.text.sample import TextOutput


def absorb(into: TextOutput, new: TextOutput) -> None:
    """Append `new` to `into` (the same sample, in order); both must be the caller's own."""
    a, b = into.tokens, new.tokens
    into.text += new.text
    into.logprob_texts += new.logprob_texts
    into.input_logprob_texts += new.input_logprob_texts
    a.new_ids += b.new_ids
    a.logprobs += b.logprobs
    a.input_logprobs += b.input_logprobs
    a.input_hidden += b.input_hidden
    a.hidden += b.hidden
    a.finish = b.finish or a.finish
    a.prompt_tokens = max(a.prompt_tokens, b.prompt_tokens)
    a.cached_tokens = max(a.cached_tokens, b.cached_tokens)
    a.completion_tokens = max(a.completion_tokens, b.completion_tokens)
    a.retractions = max(a.retractions, b.retractions)
    a.transfer_retries = max(a.transfer_retries, b.transfer_retries)
    a.cached_by_tier = b.cached_by_tier or a.cached_by_tier
    a.times = {**a.times, **b.times}
    a.stages = b.stages or a.stages


def without_tokens(output: TextOutput) -> TextOutput:
    """The same without its new tokens: a request for 0 tokens runs as one for 1 and drops it."""
    tokens = output.tokens
    tokens.new_ids, tokens.logprobs, tokens.hidden = [], [], []
    output.text, output.logprob_texts = "", []
    if tokens.finish is not None and tokens.finish.kind == "stop":
        tokens.finish = FinishReason(kind="length")
    return output
