"""Routes that any worker of a model answers: models, tokenizer, prompt costs."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from router.client.session import call_worker
from router.http.worker_calls import WorkerCalls
from router.pool.models import join_models
from router.pool.worker import Worker
from service.aside import BODIES
from service.http.json_depth import decode_or_none
from service.http.paths import segment
from service.http.stream import json_response
from service.model_names import untagged
from service.security.keys import authorization_of

_MODEL = "/v1/models/"
_RENDERED = ("/v1/completions/render", "/v1/chat/completions/render")
ASKED = (
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    *_RENDERED,
    "/api/show",
)  # POST, with the model in the body
_ALIASES = ("/v1/tokenize", "/v1/detokenize")
DESCRIBED = ("/get_model_info", "/model_info", "/api/version")
LISTS = {  # fields of the rows, and of a row's name
    "/v1/models": ("data", "id"),
    "/api/tags": ("models", "name"),
    "/api/ps": ("models", "name"),
}


class _Named(msgspec.Struct):
    model: Any = msgspec.UNSET
    name: Any = None


@dataclass(eq=False)
class AnyWorkerApi:
    calls: WorkerCalls

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self.ask) for path in (*ASKED, *_ALIASES)),
            *(web.get(path, self.calls.call_one) for path in DESCRIBED),
            *(web.get(path, self.list_models) for path in LISTS),
            web.get(_MODEL + "{model}", self.get_model),
        ]

    async def ask(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        named = await BODIES.run(partial(decode_or_none, body, _Named), size=len(body)) or _Named()
        name = named.name if named.model is msgspec.UNSET else named.model
        return await self._call_for(request, untagged(name) if isinstance(name, str) else "")

    async def get_model(self, request: web.BaseRequest) -> web.Response:
        name = request.path.removeprefix(_MODEL)
        return await self._call_for(request, name, path=_MODEL + segment(name))

    async def list_models(self, request: web.BaseRequest) -> web.Response:
        if not self.calls.table.models.several:
            return await self.calls.call_one(request)
        field, key = LISTS[request.path]
        models = join_models(await self._lists(request), field=field, key=key)
        return json_response({"object": "list", field: models} if field == "data" else {field: models})

    async def _lists(self, request: web.BaseRequest) -> list[object]:
        headers = self.calls.credentials.for_client(authorization_of(request.headers))
        speakers: dict[str, Worker] = {}
        for role in reversed(self.calls.roles):
            for worker in self.calls.table.alive(role):
                speakers.setdefault(next(iter(worker.models), ""), worker)
        calls = (call_worker(self.calls.session, "GET", w.url + request.path, headers) for w in speakers.values())
        return [decode_or_none(answer.body) for answer in await asyncio.gather(*calls)]

    async def _call_for(self, request: web.BaseRequest, name: str, *, path: str = "") -> web.Response:
        return await self.calls.call_one(request, model=self.calls.table.models.meant(name), path=path)
