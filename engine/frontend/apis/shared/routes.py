"""Routes of a worker's APIs. Pure."""

from dataclasses import dataclass
from functools import partial

from service.http.routes import HttpRoute, Tag
from service.security.keys import Access


@dataclass(frozen=True)
class ApiRoute(HttpRoute):
    """A worker's route. `anywhere`: on any frontend. `computes`: needs the text model."""

    anywhere: bool = False
    computes: bool = False


get_route, post_route = partial(ApiRoute, "GET"), partial(ApiRoute, "POST")
open_route = partial(ApiRoute, "GET", need=Access.NONE, is_polled=True)  # health and metrics, without user data
token_route = partial(ApiRoute, "POST", anywhere=True, computes=True)
put_route = partial(ApiRoute, "PUT", anywhere=True, computes=True)
admin_route = partial(ApiRoute, "POST", need=Access.ADMIN)  # affects every client, writes to disk, or stops the server


class RouteTags:
    CHATS = Tag("Chats and completions", "OpenAI's chats and completions.")
    RESPONSES = Tag("Responses", "OpenAI's Responses: answers that the server remembers.")
    MESSAGES = Tag("Messages", "Anthropic's Messages.")
    GENERATE = Tag("Generate", "SGLang's native API: text, token ids, or both.")
    SCORES = Tag("Embeddings and scores", "Vectors, scores and ranks of texts, without an answer.")
    OLLAMA = Tag("Ollama", "Ollama's chats and texts.")
    TOKENS = Tag("Tokens", "Texts to token ids and back.")
    SERVER = Tag("Models and server", "The models that are served, the server's state, figures and traces.")
    HEALTH = Tag("Health", "Probes.")
    OPERATIONS = Tag(
        "Operations", "Requests, caches, weights, adapters, memory, roles and profiles of a running server."
    )
