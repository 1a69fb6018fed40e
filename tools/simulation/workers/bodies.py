"""Bodies that a simulated worker takes, and the requests of its engine that they ask for."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefill_only import NOTHING_NEW
from engine.frontend.apis.shared.resumable import earlier_of, going_on
from engine.frontend.services import SERVICES
from engine.messages import Bootstrap, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from service.http.errors import bad_field
from service.http.resume import Resume
from service.kv_events import namespace_of
from tools.simulation.http import Request
from tools.simulation.options import SECRET
from tools.simulation.workers.images import PlacedImage

MAX_NEW_TOKENS = 4096


class SamplingBody(msgspec.Struct):
    max_new_tokens: int
    n: int = 1


class GenerateBody(msgspec.Struct):
    input_ids: list[int]
    sampling_params: SamplingBody
    bootstrap_room: int | list[int]
    bootstrap_host: str | list[str]
    bootstrap_port: int | list[int]
    stream: bool = False
    priority: int = 0
    extra_key: str = ""
    images: list[tuple[int, int]] = []  # where each begins, and its number
    resume: Resume | None = None


class EmbeddingBody(msgspec.Struct):
    input: list[list[int]]


def requests_of(body: GenerateBody, new_rid: Callable[[], str]) -> list[GenerateRequest]:
    """Samples of one body."""
    rooms, hosts, ports = map(_listed, (body.bootstrap_room, body.bootstrap_host, body.bootstrap_port))
    if not (len(rooms) == len(hosts) == len(ports) == body.sampling_params.n):
        raise bad_field("bootstrap_room", "as many rooms as samples")
    num_new = min(body.sampling_params.max_new_tokens, MAX_NEW_TOKENS)
    images = [PlacedImage(start, number).input() for start, number in body.images]
    return [
        GenerateRequest(
            rid=new_rid(),
            input_ids=body.input_ids,
            sampling=SamplingParams(max_new_tokens=num_new, temperature=0.0),
            bootstrap=Bootstrap(host, port, room),
            stream=body.stream,
            priority=body.priority,
            namespace=namespace_of(None, body.extra_key),
            images=images,
        )
        for room, host, port in zip(rooms, hosts, ports, strict=True)
    ]


def embedding_requests_of(body: EmbeddingBody, new_rid: Callable[[], str]) -> list[GenerateRequest]:
    """As engine/frontend/apis/openai/embeddings.py."""
    return [
        GenerateRequest(
            rid=new_rid(),
            input_ids=ids,
            sampling=NOTHING_NEW,
            skip_cache_insert=True,
            alone=True,
            pooling="mean",
        )
        for ids in body.input
    ]


def resumed(body: GenerateBody, requests: list[GenerateRequest]) -> tuple[list[GenerateRequest], Sequence[TokenOutput]]:
    """Requests that go on where an earlier answer ended, and its outputs."""
    if body.resume is None:
        return requests, ()
    requests = going_on(body.resume, requests)
    return requests, earlier_of(body.resume, requests)


def seen_by_encoders(request: Request, requests: list[GenerateRequest], *, role: str) -> list[GenerateRequest]:
    """With the encoder workers that the router names."""
    spec = SimpleNamespace(mode=role, secret=SECRET, bootstrap_allowlist=SimpleNamespace(admits=lambda at: True))
    web: Any = _Web(request.headers, spec)
    return with_image_encoders(web, requests)


class _Web(dict[Any, Any]):
    """`headers` of a request, and the services of its worker."""

    def __init__(self, headers: Mapping[str, str], spec: SimpleNamespace) -> None:
        super().__init__({SERVICES: SimpleNamespace(spec=spec)})
        self.headers = headers


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
