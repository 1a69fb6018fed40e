"""Fields that bodies of several APIs have. Optional ones may be null. Pure."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from engine.frontend.apis.shared.constraints import GrammarFields, ResponseFormat, StructuredFields
from engine.frontend.bootstraps import BootstrapFields
from service.http.body import Body, optional

PerPrompt = str | list[str | None] | None  # one for all prompts, or one each

_INT = re.compile(r"-?(0|[1-9][0-9]*)")


def _with_int_keys(value: Any) -> Any:
    """JSON has no other keys than texts."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and _INT.fullmatch(key) else key: bias for key, bias in value.items()}


class SamplingFields(GrammarFields):
    """Sampling fields of OpenAI, SGLang and vLLM."""

    temperature: float | None = optional(
        "Randomness of sampling: 0 always takes the likeliest token. At least 0; default 1, outside /generate the "
        "checkpoint's.",
        0.7,
    )
    top_p: float | None = optional(
        "Samples from the likeliest tokens whose probabilities add up to this. Above 0, up to 1; default 1, outside "
        "/generate the checkpoint's.",
        0.95,
    )
    top_k: int | None = optional(
        "Samples from this many of the likeliest tokens (SGLang, vLLM). At least 1; default -1 (all), outside "
        "/generate the checkpoint's.",
        40,
    )
    min_p: float | None = optional(
        "Leaves out tokens less likely than this share of the likeliest one (SGLang, vLLM). 0 to 1; default 0, "
        "outside /generate the checkpoint's.",
        0.05,
    )
    frequency_penalty: float | None = optional(
        "Subtracted from a token's logit for each time that it is in the answer. -2 to 2; default 0.", 0.5
    )
    presence_penalty: float | None = optional(
        "Subtracted from the logit of each token that is in the answer. -2 to 2; default 0.", 0.5
    )
    repetition_penalty: float | None = optional(
        "Divides logits of tokens that occurred before (SGLang, vLLM): above 1 avoids repetition. Above 0, up to 2; "
        "default 1, outside /generate the checkpoint's.",
        1.1,
    )
    seed: int | None = optional(
        "The same seed gives the same samples. 64 bits; by default the server derives one from --random-seed.", 42
    )
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_with_int_keys)] = optional(
        "Added to the logits of tokens, by token id as text. -100 to 100.", {"50256": -100}
    )
    stop: str | list[str] | None = optional(
        "Texts that end the answer, one or up to 32, of up to 1024 characters each. The answer leaves them out.",
        ["\n\n"],
    )
    stop_token_ids: list[int] | None = optional("Token ids that end the answer (SGLang, vLLM).", [2])
    ignore_eos: bool | None = optional(
        "True: the answer goes on after the model's end token (SGLang, vLLM). Default false.", False
    )
    skip_special_tokens: bool | None = optional(
        "False: special tokens stay in the text (SGLang, vLLM). Default true.", True
    )
    spaces_between_special_tokens: bool | None = optional(
        "Not used: tokenizers here add no such spaces (SGLang, vLLM).", False
    )
    n: int | None = optional("Number of answers to each prompt, 1 to 128; default 1.", 2)
    stream_interval: int | None = optional(
        "Tokens between two messages of a stream, 1 to 1048576 (SGLang). Default: the server's --stream-interval.", 8
    )
    stop_regex: str | list[str] | None = optional(
        "RE2 patterns that end the answer, one or up to 8, of up to 1024 characters each (SGLang).", "\\d{4}"
    )
    no_stop_trim: bool | None = optional(
        "True: the stop text stays at the end of the answer (SGLang). Default false.", False
    )
    include_stop_str_in_output: bool | None = optional("vLLM's name of no_stop_trim. Default false.", False)
    allowed_token_ids: list[int] | None = optional("Only these token ids are sampled (vLLM). Default: all.", [9, 10])
    bad_words: list[str] | None = optional(
        "Words that the answer never contains, alone or after a space (vLLM). Up to 8192 characters together.", ["foo"]
    )


class RoutingFields(Body):
    """Prefix cache namespace (`cache_salt`, SGLang's `extra_key`), conversation, DP rank."""

    cache_salt: PerPrompt = optional(
        "Only requests with the same text share prefixes in the cache (vLLM, SGLang). One, or one per prompt.",
        "tenant-7f3a",
    )
    extra_key: PerPrompt = optional(
        "Like cache_salt, and beside it: only requests with the same text share prefixes (SGLang).", "a"
    )
    session_id: str | int | None = optional(
        "Name of the conversation (SGLang): its KV is kept by when its next turn is expected. Up to 1024 characters.",
        "agent-7",
    )
    prompt_cache_key: str | None = optional("The same (OpenAI), where session_id is absent.", "agent-7")
    expected_return_s: float | None = optional("Seconds from the answer to the conversation's next turn.", 20.0)
    returns_within_s: float | None = optional("The most of these seconds.", 300.0)
    routed_dp_rank: int | None = optional(
        "Data parallel rank that computes the request, from 0 (SGLang). Default: the server chooses.", 0
    )
    data_parallel_rank: int | None = optional("SGLang's older name of routed_dp_rank.", 0)


class OwnFields(BootstrapFields, RoutingFields):
    """Fields that bodies of other companies' APIs have, too."""

    rid: str | None = optional(
        "The request's id, for /abort_request (SGLang). Default: the server makes one.", "my-request-1"
    )
    priority: int | None = optional(
        "Higher goes first, with --enable-priority-scheduling (SGLang). -2147483647 to 2147483647; default 0.", 0
    )
    lora_path: str | None = optional("Name of a loaded LoRA adapter (SGLang). Default: the base model.", "my-adapter")
    user: str | None = optional("Name of the client's own user (OpenAI). Answers do not depend on it.", "user-1")


def own_fields(body: OwnFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in OwnFields.model_fields}


class StreamOptions(Body):
    include_usage: bool | None = optional("True: a last message counts the tokens. Default false.", True)
    continuous_usage_stats: bool | None = optional(
        "True: each message counts the tokens so far (vLLM). Default false.", False
    )


class RequestFields(SamplingFields, OwnFields, StructuredFields):
    """Fields of completions and chats."""

    model: str | None = optional(
        "Name of the model, of a LoRA adapter, or BASE:ADAPTER. Default: the model that is served.", "smollm2"
    )
    stream: bool | None = optional("True: the answer comes as server-sent events. Default false.", True)
    stream_options: StreamOptions | None = optional("Options of a stream; they need stream.", {"include_usage": True})
    max_tokens: int | None = optional(
        "Most tokens of the answer, at least 0. Default: 16 for a completion, what fits into the context for a chat.",
        256,
    )
    min_tokens: int | None = optional(
        "Tokens before which no stop text or end token ends the answer (vLLM). At least 0; default 0.", 1
    )
    response_format: ResponseFormat | None = optional("Format that the answer follows.", {"type": "json_object"})
    return_token_ids: bool | None = optional(
        "True: choices have token_ids, and once prompt_token_ids (vLLM). Default false.", True
    )
    return_hidden_states: bool | None = optional(
        "True: choices have the last token's hidden state (SGLang); needs --enable-return-hidden-states.", False
    )


class ChatFields(RequestFields):
    parallel_tool_calls: bool | None = optional("False: at most one call. Default true.", True)
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the chat template (SGLang, vLLM).", {"enable_thinking": False}
    )
    thinking_token_budget: int | None = optional(
        "Tokens of reasoning after which its end is forced, at least 0 (vLLM). Default: no limit.", 1024
    )
