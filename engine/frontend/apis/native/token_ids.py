"""Native extras: logprobs of requested token ids, and hidden states. Pure."""

import array
from typing import Any

from engine.messages import MAX_ASKED_TOKEN_IDS, TokenOutput
from service.http.errors import bad_field

FIELD = "token_ids_logprob"


def asked_token_ids(value: list[Any] | None, num_prompts: int, *, vocab_size: int) -> list[tuple[int, ...]]:
    """`token_ids_logprob`, one list for all prompts or one for each (null: none there). Raises ApiError(400)."""
    if not value:
        return [()] * num_prompts
    nested = [v for v in value if not isinstance(v, int)]
    if not nested:
        return [_checked(value, vocab_size=vocab_size)] * num_prompts
    if len(nested) < len(value):
        raise bad_field(FIELD, "must be a list of token ids or a list of such lists")
    if len(nested) != num_prompts:
        raise bad_field(FIELD, f"has {len(nested)} lists for {num_prompts} prompts")
    return [_checked(ids or [], vocab_size=vocab_size) for ids in nested]


def hidden_state_lists(tokens: TokenOutput) -> list[Any]:
    """[prompt][hidden], then [hidden] per later token, as in SGLang. Decode's answer lacks the first; the router adds it."""
    later = [array.array("f", row).tolist() for row in tokens.hidden]
    if not tokens.input_hidden:
        return later
    prompt = array.array("f", tokens.input_hidden)
    width = len(prompt) // tokens.prompt_tokens
    return [[prompt[at : at + width].tolist() for at in range(0, len(prompt), width)], *later]


def _checked(ids: list[int], *, vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_ASKED_TOKEN_IDS:
        raise bad_field(FIELD, f"at most {MAX_ASKED_TOKEN_IDS} token ids, got {len(ids)}")
    for i in ids:
        if not 0 <= i < vocab_size:
            raise bad_field(FIELD, f"{i} is not a token id (0 to {vocab_size - 1})")
    return tuple(ids)
