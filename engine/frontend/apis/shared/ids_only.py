"""Rejects body fields that need text, without tokenizer (--skip-tokenizer-init)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.frontend.served_model import NO_TOKENIZER
from service.http.body import Body
from service.http.errors import unsupported

IDS = "tokenize it yourself, and send token ids"
CHAT = "render and tokenize it yourself, and send input_ids to /generate"
PAIRS = "tokenize pairs yourself, and send query and items as token ids to /v1/score"
SHAPE = "allowed_token_ids and logit_bias shape an answer by token ids"


class _Rule(NamedTuple):
    """A field's remedy. `asks`: whether a value needs a tokenizer."""

    asks: Callable[[Any], bool]
    remedy: str


def check_ids_only(body: Body, *, inside: str = "") -> None:
    """Raise ApiError(400) for the first field that needs a tokenizer."""
    for name, rule in _RULES.items():
        if name in type(body).model_fields and rule.asks(getattr(body, name)):
            raise unsupported(inside + name, f"{NO_TOKENIZER}; {rule.remedy}")
    params = getattr(body, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        if one is not None:
            check_ids_only(one, inside="sampling_params.")


def _is_given(value: Any) -> bool:
    return value is not None


def _is_text(value: Any) -> bool:
    """True if a prompt is text; handlers reject empty ones."""
    if isinstance(value, list):
        return any(map(_is_text, value))
    return isinstance(value, Body) or (isinstance(value, str) and bool(value))


# For any body; prompt fields first.
_RULES = {
    **dict.fromkeys(("documents", "text_1", "text_2"), _Rule(_is_given, PAIRS)),
    **dict.fromkeys(("input", "prompt", "query", "items"), _Rule(_is_text, IDS)),
    "text": _Rule(_is_given, "tokenize it yourself, and send input_ids"),
    "messages": _Rule(bool, CHAT),
    "tokens": _Rule(bool, "decode them yourself"),
    **dict.fromkeys(("stop", "stop_regex"), _Rule(bool, "send stop_token_ids")),
    "bad_words": _Rule(bool, "logit_bias makes token ids unlikely"),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _Rule(_is_given, SHAPE)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _Rule(_is_given, SHAPE)),
    "structured_outputs": _Rule(_is_given, SHAPE),
    "response_format": _Rule(lambda format: format is not None and format.type != "text", SHAPE),
    "return_text_in_logprobs": _Rule(bool, "leave it out: logprobs have token ids"),
    "require_reasoning": _Rule(bool, "leave it out: reasoning is found by its text"),
    "max_thinking_tokens": _Rule(_is_given, "leave it out: max_new_tokens bounds the whole answer"),
    "echo": _Rule(bool, "leave it out: return_token_ids shows the prompt's token ids"),
    "logprobs": _Rule(_is_given, "ask /generate with return_logprob, which shows them by token id"),
    "return_token_ids": _Rule(
        lambda value: value is not True, "set it to true: choices have no text, or ask /generate"
    ),
}
