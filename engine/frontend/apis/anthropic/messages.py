"""POST /v1/messages and /v1/messages/count_tokens: body -> chat -> plan -> view."""

from functools import partial

from aiohttp import web

from engine.frontend.apis.anthropic.body import COUNT_TOKENS, MESSAGES, MessagesBody
from engine.frontend.apis.anthropic.translate import NAMES, chat_of, sampled_chat_of
from engine.frontend.apis.anthropic.view import MessageShape, MessageView
from engine.frontend.apis.chat.plan import ChatPlan, answer_chat, plan_chat
from engine.frontend.apis.shared.body_reader import beside_loop
from engine.frontend.apis.shared.other_apis import in_words_of
from engine.frontend.apis.shared.resumable import MintedIds, ids_of
from engine.frontend.apis.shared.stream import Framing
from engine.frontend.services import SERVICES, Services
from service.http.stream import json_response, typed_event

TYPED = Framing(encode=typed_event)


async def messages(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = await MESSAGES.read(request)
    with in_words_of(NAMES):
        reasons = bool(s.spec.engine.reasoning_parser)
        chat = await beside_loop(request, partial(sampled_chat_of, body, reasons=reasons))
        plan = await plan_chat(s, chat)
        view = partial(MessageView, _shape(s, body, plan, ids_of(request)))
        return await answer_chat(request, chat, plan, id_prefix="msg_", view=view, framing=TYPED, cut=True)


async def count_tokens(request: web.BaseRequest) -> web.StreamResponse:
    body = await COUNT_TOKENS.read(request)
    with in_words_of(NAMES):
        chat = await beside_loop(request, partial(chat_of, body))
        plan = await plan_chat(request[SERVICES], chat, fits=False)
    return json_response({"input_tokens": len(plan.input_ids)})


def _shape(s: Services, body: MessagesBody, plan: ChatPlan, ids: MintedIds) -> MessageShape:
    return MessageShape(
        reader=plan.reader,
        mint_id=plan.call_ids.minted_by(ids.mint, "toolu_"),
        fills_context=len(plan.input_ids) + body.max_tokens > s.context_length,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
    )
