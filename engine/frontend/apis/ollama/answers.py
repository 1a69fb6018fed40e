"""POST /api/chat and /api/generate: body -> chat or completion -> view."""

import time
from functools import partial
from typing import Any

from aiohttp import web

from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.calls import CallIds
from engine.frontend.apis.chat.plan import answer_chat, plan_chat
from engine.frontend.apis.ollama.body import CHAT, GENERATE, OllamaFields, OllamaGenerateBody
from engine.frontend.apis.ollama.translate import NAMES, chat_of, completion_of, prompted_chat_of
from engine.frontend.apis.ollama.view import (
    OllamaShape,
    OllamaView,
    Show,
    chat_message,
    loaded,
    response_text,
)
from engine.frontend.apis.shared.body_reader import beside_loop
from engine.frontend.apis.shared.fields import prompt_ids
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.apis.shared.other_apis import in_words_of
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.apis.shared.samples import answer_samples, body_constraint, sampling_of
from engine.frontend.apis.shared.stream import Framing
from engine.frontend.services import SERVICES, Services
from engine.text.parts import WholeAnswer
from service.http.stream import LINES_HEADERS, json_response, line
from service.model_names import untagged

LINES = Framing(headers=LINES_HEADERS, encode=line)


async def chat(request: web.BaseRequest) -> web.StreamResponse:
    start_ns = time.monotonic_ns()
    body = await CHAT.read(request)
    with in_words_of(NAMES):
        if not body.messages:
            return _loaded(request[SERVICES], body, chat_message)
        return await _answer_chat(
            request, body, await beside_loop(request, partial(chat_of, body)), show=chat_message, start_ns=start_ns
        )


async def generate(request: web.BaseRequest) -> web.StreamResponse:
    """Prompts are raw without a chat template."""
    start_ns, s = time.monotonic_ns(), request[SERVICES]
    body = await GENERATE.read(request)
    with in_words_of(NAMES):
        if not body.prompt:
            return _loaded(s, body, response_text)
        if body.raw or s.model.template is None:
            return await _complete(request, body, body.prompt, start_ns=start_ns)
        return await _answer_chat(request, body, prompted_chat_of(body), show=response_text, start_ns=start_ns)


async def _answer_chat(
    request: web.BaseRequest, body: OllamaFields, chat: ChatBody, *, show: Show, start_ns: int
) -> web.StreamResponse:
    plan = await plan_chat(request[SERVICES], chat)
    mint_id = plan.call_ids.minted_by(ids_of(request).mint, "call_")
    shape = OllamaShape(model=body.model, start_ns=start_ns, show=show, reader=plan.reader, mint_id=mint_id)
    return await answer_chat(
        request, chat, plan, id_prefix="chat-", view=partial(OllamaView, shape), framing=LINES, cut=True
    )


async def _complete(
    request: web.BaseRequest, body: OllamaGenerateBody, prompt: str, *, start_ns: int
) -> web.StreamResponse:
    s, fields = request[SERVICES], completion_of(body)
    model, constraint = choose_model(s, fields.model, fields.lora_path), body_constraint(fields)
    mint_id = CallIds().minted_by(ids_of(request).mint, "call_")
    shape = OllamaShape(model=body.model, start_ns=start_ns, show=response_text, reader=None, mint_id=mint_id)
    return await answer_samples(
        request,
        fields,
        id_prefix="gen-",
        prompts=[await prompt_ids(s, prompt, field="prompt")],
        params=sampling_of(s, fields, max_tokens=fields.max_tokens, name="max_tokens", constraint=constraint),
        logprobs=None,
        constraint=constraint,
        model=model,
        field="prompt",
        view=partial(OllamaView, shape),
        framing=LINES,
        cut=True,
    )


def _loaded(s: Services, body: OllamaFields, show: Show) -> web.Response:
    choose_model(s, untagged(body.model), body.lora_path)
    shown: dict[str, Any] = show(WholeAnswer())
    return json_response(loaded(body.model, shown))
