"""OpenAI's logprobs of an answer. Pure."""

from typing import Any

from engine.frontend.apis.shared.stream import finite
from engine.messages import TokenLogprob
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer


def token_logprobs(output: TextOutput, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    pairs = zip(output.tokens.logprobs, output.logprob_texts, strict=False)
    return [_token(lp, text, top, tokenizer) for lp, (text, top) in pairs]


def _token(lp: TokenLogprob, text: str, top_texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_entry(t, i, p, tokenizer) for t, (p, i) in zip(top_texts, lp.top, strict=False)]
    return {**_entry(text, lp.token_id, lp.logprob, tokenizer), "top_logprobs": top}


def _entry(text: str, token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    own = tokenizer.token_bytes(token_id)
    if own == b" " + text.encode():  # an answer's first token, without its leading space
        own = own[1:]
    return {"token": text, "logprob": finite(logprob), "bytes": list(own)}
