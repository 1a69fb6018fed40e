"""Routes that need a model with a special head, and alternatives.

404, as OpenAI's SDK would retry a 501.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from service.http.errors import ApiError

EMBEDDINGS = "/v1/embeddings makes vectors to compare"


@dataclass(frozen=True, slots=True)
class Head:
    needs: str
    instead: str


_POOLING = Head("a model with a pooling head", f"{EMBEDDINGS}, and so does /encode")
UNSERVED: Mapping[str, Head] = {
    "/pooling": _POOLING,
}


async def refuse(request: web.BaseRequest) -> web.StreamResponse:
    path = request.path.rstrip("/")
    head = UNSERVED[path]
    message = f"{path} needs {head.needs}; the models here generate text. Instead: {head.instead}"
    raise ApiError(404, message, code="model_has_no_head")


def unserved_routes() -> list[web.RouteDef]:
    return [web.post(path, refuse) for path in UNSERVED]
