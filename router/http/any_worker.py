"""Routes beside generation that one worker answers for all that serve the model: what a prompt would cost, what a model is."""

from dataclasses import dataclass

from aiohttp import web

from router.http.worker_calls import WorkerCalls
from service.http.json_depth import object_of

ASKED = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")  # POST, with the model in the body
_ALIASES = ("/v1/tokenize", "/v1/detokenize")


@dataclass(eq=False)
class AnyWorkerApi:
    calls: WorkerCalls

    def routes(self) -> list[web.RouteDef]:
        return [web.post(path, self.ask) for path in (*ASKED, *_ALIASES)]

    async def ask(self, request: web.BaseRequest) -> web.Response:
        """Pass it to the first worker that answers; what is no model's name is for the worker to refuse."""
        model = object_of(await request.read()).get("model")
        return await self.calls.call_one(
            request, model=self.calls.table.models.meant(model if isinstance(model, str) else "")
        )
