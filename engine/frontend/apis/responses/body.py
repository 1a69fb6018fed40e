"""Body of /v1/responses, and checks of its own fields. Pure.

https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Any

from engine.frontend.apis.chat.body import MAX_TOP_LOGPROBS
from engine.frontend.apis.chat.tools import MAX_TOOLS
from engine.frontend.apis.shared.body_reader import CHAT, BodyReader, Unserved
from engine.frontend.apis.shared.constraints import JsonSchemaFormat
from engine.frontend.apis.shared.fields import check_range
from engine.frontend.apis.shared.request_body import ChatFields
from service.http.body import Body, optional, required
from service.http.errors import bad_field, check_choice, missing, unsupported

LOGPROBS = "message.output_text.logprobs"
# `include` values for built-in tools, images and encrypted reasoning, always empty here.
_EMPTY_INCLUDES = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    "reasoning.encrypted_content",
)
FORMATS = ("text", "json_object", "json_schema")
TRUNCATIONS = ("auto", "disabled")
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
MODES = ("auto", "required")
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
# Chat fields and their replacement here.
MOVED = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "rid": "the answer's id is the request's",
    "return_token_ids": "ask /v1/chat/completions",
    "return_hidden_states": "ask /v1/chat/completions",
}
_REFUSED = {
    **CHAT,
    "background": Unserved("leave it out; the answer comes while the client waits"),
    "conversation": Unserved("use previous_response_id, or send all items"),
    "context_management": Unserved("shorten the input, or set truncation to auto"),
    "moderation": Unserved("leave it out"),
    "prompt": Unserved("write the prompt's text into instructions and input"),
}


class Part(Body):
    """A part of a message, tool output, or reasoning."""

    type: str = required(
        "input_text, output_text, text, summary_text, reasoning_text, refusal or input_image.", "input_text"
    )
    text: str | None = optional("Text, for the types of texts.", "What is this?")
    refusal: str | None = optional("Text of an earlier refusal, for type refusal.", "I cannot do that.")
    image_url: str | None = optional("URL or data URL, for type input_image.", "https://example.com/cat.png")
    file_id: str | None = optional("A stored file. Not supported: send image_url.", None)
    detail: str | None = optional("OpenAI's resolution of an image. Not used.", "auto")
    annotations: Any = optional("Annotations of an earlier answer. Not used.", [])
    logprobs: Any = optional("Logprobs of an earlier answer. Not used.", [])


class Item(Body):
    """An item; `type` decides which fields count, default a message. The last ones are ignored."""

    type: str | None = optional(
        "message (the default), function_call, function_call_output, reasoning or item_reference.", "message"
    )
    id: str | None = optional("The item's id; for item_reference, of the item that is meant.", "msg_1")
    role: str | None = optional("user, assistant, system or developer, for a message.", "user")
    content: str | list[Part] | None = optional("Text or parts, for a message or reasoning.", "Hello")
    call_id: str | None = optional("Id of the call, for function_call and its output.", "call_1")
    name: str | None = optional("Name of the function, for function_call.", "get_weather")
    arguments: str | None = optional("Arguments as JSON text, for function_call.", '{"city": "Paris"}')
    output: str | list[Part] | None = optional("Result of the call, for function_call_output.", "12 degrees")
    summary: list[Part] | None = optional(
        "Summary of the reasoning, used without content.", [{"type": "summary_text", "text": "It greets."}]
    )
    encrypted_content: Any = optional("Encrypted reasoning. Not used.", None)
    phase: Any = optional("Phase of an earlier answer. Not used.", "final_answer")
    status: Any = optional("Status of an earlier item. Not used.", "completed")


class ResponseTool(Body):
    type: str = required("Only function: this server runs no tools of its own.", "function")
    name: str | None = optional("1 to 64 letters, digits, dots, dashes or underscores. Required.", "get_weather")
    description: str | None = optional("What the function does, for the model.", "Weather of a city")
    parameters: dict[str, Any] | None = optional(
        "JSON schema of the arguments. Default: any object.",
        {"type": "object", "properties": {"city": {"type": "string"}}},
    )
    strict: bool | None = optional(
        "True: calls by the model's choice match the schema, too. Forced calls always do. Default false.", True
    )


class ResponseToolChoice(Body):
    type: str = required("function or allowed_tools.", "function")
    name: str | None = optional("Name of the function to call, for type function.", "get_weather")
    mode: str | None = optional("auto or required, for type allowed_tools.", "auto")
    tools: list[ResponseTool] | None = optional(
        "The tools that may be called, for type allowed_tools.", [{"type": "function", "name": "get_weather"}]
    )


class TextFormat(JsonSchemaFormat):
    type: str = required("text, json_object (any object) or json_schema.", "json_schema")


class TextConfig(Body):
    format: TextFormat | None = optional("Format that the answer follows. Default: text.", {"type": "json_object"})
    verbosity: str | None = optional("low, medium or high. Answers do not depend on it.", "medium")


class Reasoning(Body):
    effort: str | None = optional(
        "Goes to the chat template: none (no reasoning), low, medium, high, or what the template knows.", "low"
    )
    summary: str | None = optional("auto, concise or detailed. Not used: no summary is written.", "auto")
    generate_summary: str | None = optional("Older name of summary. Not used.", "auto")


class ResponseBody(ChatFields):
    """Body of /v1/responses. `history`, `first_response_id`: from a router."""

    input: str | list[Item] = required(
        "What the user says, or the items of the conversation.", "What is the capital of France?"
    )
    history: list[Item] | None = optional("Items before input, which a router keeps (Tandem).", [])
    first_response_id: str | None = optional("Id of the conversation's first response, which a router keeps.", "resp_1")
    instructions: str | None = optional("The system message, for this answer alone.", "You answer in one sentence.")
    previous_response_id: str | None = optional("Id of a kept response, which this one continues.", "resp_1")
    store: bool | None = optional("False: the answer is not kept. Default true, where answers are kept.", False)
    tools: list[ResponseTool] | None = optional(
        f"Functions that the model may call, at most {MAX_TOOLS}.", [{"type": "function", "name": "get_weather"}]
    )
    tool_choice: str | ResponseToolChoice | None = optional(
        "none, auto, required (at least one call), or the tool to call. Default: auto.", "auto"
    )
    max_tool_calls: int | None = optional("Calls of built-in tools. Not used: there are none.", 1)
    max_output_tokens: int | None = optional("Most tokens of the answer, at least 1. Default: what fits.", 256)
    text: TextConfig | None = optional("Format of the answer.", {"format": {"type": "json_object"}})
    reasoning: Reasoning | None = optional("How the model reasons.", {"effort": "low"})
    include: list[str] | None = optional(f"What the answer has besides: {LOGPROBS}.", [LOGPROBS])
    top_logprobs: int | None = optional(
        f"Likeliest tokens to show beside each token, 0 to {MAX_TOP_LOGPROBS}. Needs include.", 5
    )
    truncation: str | None = optional(
        "auto (drops the oldest turns of a conversation that is too long), or disabled (the default).", "auto"
    )
    metadata: dict[str, str] | None = optional(
        "Up to 16 texts that the answer repeats; keys of up to 64 characters, values of up to 512.", {"topic": "demo"}
    )
    safety_identifier: str | None = optional("Name of the client's own user. The answer repeats it.", "user-1")
    service_tier: str | None = optional("Capacity of OpenAI's service. Not used.", "auto")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


READER = BodyReader(
    body=ResponseBody,
    refused=_REFUSED,
    looked_into=("input", "tools", "tool_choice", "stream_options", "text", "reasoning"),
)


def check_response(body: ResponseBody) -> None:
    """Raises ApiError(400)."""
    for name, remedy in MOVED.items():
        if getattr(body, name) is not None:
            raise unsupported(name, f"is no field of this API; {remedy}")
    if body.n not in (None, 1):
        raise unsupported("n", "a response is one answer; leave it out")
    check_choice("truncation", body.truncation, TRUNCATIONS)
    check_range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    for index, name in enumerate(body.include or ()):
        check_choice(f"include[{index}]", name, (LOGPROBS, *_EMPTY_INCLUDES))
    _check_text(body.text or TextConfig())
    reasoning = body.reasoning or Reasoning()
    check_choice("reasoning.summary", reasoning.summary, SUMMARIES)
    check_choice("reasoning.generate_summary", reasoning.generate_summary, SUMMARIES)
    _check_metadata(body.metadata or {})
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_field("max_output_tokens", f"must be at least 1, got {body.max_output_tokens}")


def _check_text(text: TextConfig) -> None:
    check_choice("text.verbosity", text.verbosity, VERBOSITIES)
    if text.format is None:
        return
    check_choice("text.format.type", text.format.type, FORMATS)
    if text.format.type == "json_schema" and text.format.schema_ is None:
        raise missing("text.format.schema")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad_field("metadata", f"at most {MAX_METADATA} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise bad_field(
                "metadata", f"keys have at most {MAX_KEY_CHARS} characters and values {MAX_VALUE_CHARS}: {key[:80]!r}"
            )
