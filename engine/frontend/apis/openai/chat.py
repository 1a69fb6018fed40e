"""POST /v1/chat/completions: body -> plan -> view."""

from functools import partial

from aiohttp import web

from engine.frontend.apis.chat.body import READER
from engine.frontend.apis.chat.plan import answer_chat, plan_chat
from engine.frontend.apis.openai.chat_view import ChatView
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.services import SERVICES


async def chat_completions(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = await READER.read(request)
    plan = await plan_chat(s, body)
    view = partial(
        ChatView,
        body,
        tokenizer=s.model.tokenizer,
        reader=plan.reader,
        mint_id=plan.call_ids.minted_by(ids_of(request).mint, "call_"),
        prompts=[plan.input_ids] * plan.sampling.n,
        weight_version=lambda: s.weight_version,
    )
    return await answer_chat(request, body, plan, id_prefix="chatcmpl-", view=view)
