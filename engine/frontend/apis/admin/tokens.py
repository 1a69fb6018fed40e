"""Tokenization of prompts or chats (vLLM's form), and detokenization."""

from functools import partial
from typing import Any

from fastapi import Response

from engine.frontend.apis.chat.body import ChatBody, ChatMessage
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.chat.tools import Tool
from engine.frontend.apis.shared.body_reader import CHAT, BodyReader
from engine.frontend.apis.shared.fields import check_token_ids, id_lists
from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.services import SERVICES, Services
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import bad_field, read_body
from service.http.request import HttpRequest
from service.http.routes import json_response
from service.waiter import BODIES

API = ApiRouter(RouteTags.TOKENS)
OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class TokenizeBody(Body):
    prompt: str | list[str] | None = optional("A text, or several. Give this or messages.", "The capital of France")
    messages: list[ChatMessage] | None = optional(
        "A chat, whose template is applied. Give this or prompt.", [{"role": "user", "content": "Hello"}]
    )
    model: str | None = optional(
        "Name of the model or of a LoRA adapter, for a chat. Default: the model that is served.", "smollm2"
    )
    add_special_tokens: bool | None = optional(
        "Whether the tokenizer adds its own tokens. Default true for a prompt, false for a chat.", True
    )
    return_token_strs: bool | None = optional("True: the answer has the tokens' texts. Default false.", True)
    add_generation_prompt: bool | None = optional(
        "False: a chat ends without the start of an answer. Default true.", True
    )
    continue_final_message: bool | None = optional("True: a chat stays open at its last message. Default false.", False)
    tools: list[Tool] | None = optional("Tools of a chat.", [{"type": "function", "function": {"name": "get_weather"}}])
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the chat template.", {"enable_thinking": False}
    )


READER = BodyReader(
    body=TokenizeBody,
    refused={name: CHAT[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")},
    looked_into=("tools",),
)


class DetokenizeBody(Body):
    tokens: list[int | list[int]] = required("Token ids, or several lists.", [1, 450, 7483])
    model: str | None = optional("Name of the model. Not used: a server has one tokenizer.", "smollm2")
    skip_special_tokens: bool | None = optional("False: special tokens stay in the text. Default true.", True)


@API.on(token_route, "/tokenize", TokenizeBody, computes=False)
async def tokenize(request: HttpRequest) -> Response:
    """Return the token ids of a text or a chat."""
    s = request[SERVICES]
    body = await READER.read(request)
    if body.messages is not None:
        lists, single = [await _chat_ids(s, body)], True
    else:
        lists, single = await _prompt_ids(s, body), isinstance(body.prompt, str)
    shown: dict[str, list[Any]] = {"tokens": lists, "count": [len(ids) for ids in lists]}
    if body.return_token_strs:
        names, size = s.model.tokenizer.names, sum(map(len, lists))
        shown["token_strs"] = await s.texts.tokenizing.run(lambda: [names(ids) for ids in lists], size=size)
    answer = {name: values[0] for name, values in shown.items()} if single else shown
    return json_response({**answer, "max_model_len": s.context_length})


async def _chat_ids(s: Services, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        raise bad_field("prompt", "give prompt or messages, not both")
    given = {name: getattr(body, name) for name in ("messages", "model", *OF_CHATS)}
    add = bool(body.add_special_tokens)
    return (await plan_chat(s, ChatBody(**given), add_special_tokens=add, fits=False)).input_ids


async def _prompt_ids(s: Services, body: TokenizeBody) -> list[list[int]]:
    if body.prompt is None:
        raise bad_field("prompt", "is missing: give prompt, or messages")
    for name in OF_CHATS:
        if getattr(body, name):
            raise bad_field(name, "is for messages: a prompt is tokenized as it is")
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    add = body.add_special_tokens is not False
    return await s.texts.encode_all(texts, field="prompt", add_special_tokens=add)


@API.on(token_route, "/detokenize", DetokenizeBody, computes=False)
async def detokenize(request: HttpRequest) -> Response:
    """Return the text of token ids."""
    s = request[SERVICES]
    data = await request.read()
    body = await BODIES.run(partial(read_body, data, DetokenizeBody), size=len(data))
    if not s.model.has_text:
        check_ids_only(body)
    lists, single = id_lists(body.tokens, field="tokens")
    check = partial(check_token_ids, field="tokens", vocab_size=s.model.vocab_size)
    await BODIES.run(lambda: list(map(check, lists)), size=sum(map(len, lists)))
    texts = await s.texts.decode_all(lists, skip_special_tokens=body.skip_special_tokens is not False)
    return json_response({"text": texts[0] if single else texts})
