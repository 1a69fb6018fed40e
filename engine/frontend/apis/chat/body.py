"""A chat with fields of OpenAI, SGLang and vLLM; other APIs translate to it. Pure."""

from typing import Any

from engine.frontend.apis.chat.tools import MAX_TOOLS, Tool, ToolChoice
from engine.frontend.apis.shared.body_reader import CHAT, BodyReader
from engine.frontend.apis.shared.request_body import ChatFields
from engine.frontend.apis.shared.stream import finite
from engine.messages import TokenLogprob
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer
from service.http.body import Body, optional, required

MAX_TOP_LOGPROBS = 20
RESULTS = ("tool", "function")  # roles of calls' results
MEDIA = ("image_url", "video_url")


class MediaUrl(Body):
    url: str = required(
        "An http or https URL, or a data URL with base64. A video is its frames: data:video/jpeg;base64,FRAME,FRAME...",
        "https://example.com/cat.png",
    )
    detail: str | None = optional("OpenAI's resolution of an image. Not used.", "auto")
    fps: float | None = optional("Frames per second of a video (Tandem). Default 2.", 2)


class ContentPart(Body):
    type: str = required("text, image_url, video_url or refusal: the field of that name has the content.", "text")
    text: str | None = optional("Text, for type text.", "What is this?")
    refusal: str | None = optional("Text of an earlier refusal, for type refusal.", "I cannot do that.")
    image_url: str | MediaUrl | None = optional("Image, for type image_url.", {"url": "https://example.com/cat.png"})
    video_url: str | MediaUrl | None = optional(
        "Frames of a video, for type video_url (vLLM).", {"url": "data:video/jpeg;base64,/9j/4AAQ,/9j/4AAQ", "fps": 2}
    )

    def field_at(self, message: int, index: int) -> str:
        return f"messages[{message}].content[{index}].{self.type}"


class PlacedPart(ContentPart):
    """A part at `field` of another API's body."""

    field: str
    is_base64: bool = False

    def field_at(self, message: int, index: int) -> str:
        return self.field


class ChatMessage(Body):
    """One message. A field that it does not have goes to a chat template that reads it."""

    role: str = required("system, developer, user, assistant, tool or function.", "user")
    content: str | list[ContentPart] | None = optional(
        "Text, or parts. Null only for an assistant's message or a tool's result.", "What is the capital of France?"
    )
    name: str | None = optional("Name of the speaker or of the function, for templates that read it.", "get_weather")
    reasoning_content: str | None = optional("Reasoning of an assistant's message (SGLang).", "The user greets me.")
    reasoning: str | None = optional("vLLM's name of reasoning_content.", "The user greets me.")
    refusal: str | None = optional("Text of an assistant's refusal, used without content.", "I cannot do that.")
    tool_call_id: str | None = optional("Id of the call that this result (role tool) answers.", "call_1")
    tool_calls: list[dict[str, Any]] | None = optional(
        "Calls of an assistant's message, as an answer gives them.",
        [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    )
    function_call: dict[str, Any] | None = optional(
        "Older form of one of tool_calls.", {"name": "f", "arguments": "{}"}
    )
    audio: Any = optional("Not supported: only null.", None)
    annotations: Any = optional("Annotations of an earlier answer. Not used.", [])


class ChatBody(ChatFields):
    messages: list[ChatMessage] = required(
        "The conversation so far, at least one message.",
        [{"role": "user", "content": "What is the capital of France?"}],
    )
    max_completion_tokens: int | None = optional("OpenAI's newer name of max_tokens, which it precedes.", 256)
    logprobs: bool | None = optional("True: the answer has each token's logprob. Default false.", True)
    top_logprobs: int | None = optional(
        f"Likeliest tokens to show beside each token, 0 to {MAX_TOP_LOGPROBS}. Needs logprobs.", 5
    )
    reasoning_effort: str | None = optional(
        "Goes to the chat template: none (no reasoning), low, medium, high, or what the template knows.", "low"
    )
    separate_reasoning: bool | None = optional(
        "False: reasoning and its markers stay in content (SGLang). Default true, with --reasoning-parser.", True
    )
    stream_reasoning: bool | None = optional(
        "False: a stream gives the reasoning in one piece, at its end (SGLang). Default true.", True
    )
    include_reasoning: bool | None = optional("False: the answer leaves reasoning out (vLLM). Default true.", True)
    add_generation_prompt: bool | None = optional(
        "False: the prompt ends without the start of an answer (vLLM). Default true.", True
    )
    continue_final_message: bool | None = optional(
        "True: the answer continues the last message (SGLang, vLLM). Default false.", False
    )
    tools: list[Tool] | None = optional(
        f"Functions that the model may call, at most {MAX_TOOLS}.",
        [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
    )
    tool_choice: str | ToolChoice | None = optional(
        "none, auto, required (at least one call), or the tool to call. Default: auto.", "auto"
    )
    function_call: Any = optional("Older form of tool_choice: only none and auto.", "auto")
    modalities: list[str] | None = optional('Kinds of the answer: only ["text"].', ["text"])


READER = BodyReader(
    body=ChatBody,
    refused=CHAT,
    looked_into=("messages", "tools", "tool_choice", "stream_options", "response_format"),
    for_template="messages[].",
)


# ---- OpenAI's logprobs of an answer. Pure.


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
