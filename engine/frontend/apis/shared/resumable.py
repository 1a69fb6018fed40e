"""A stream that may go on at another worker (service/http/resume.py): what this worker writes for the router, and an answer that goes on here."""

import hashlib
import secrets
from collections.abc import Sequence

import msgspec
from aiohttp import web

from engine.frontend.services import SERVICES
from engine.messages import GenerateRequest
from engine.text.sample import TextOutput
from service.http.errors import ApiError, bad_field
from service.http.json_depth import decode_or_none
from service.http.resume import (
    FRAMES_HEADER,
    RESUME_FIELD,
    RESUME_HEADER,
    Begun,
    Resume,
    begin_frame,
    end_frame,
    ids_frame,
    is_signed,
)

_encode = msgspec.json.Encoder().encode


class MintedIds:
    """Ids that are unguessable, and the same at a worker where the answer goes on: of a secret salt, in the order of minting."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self._count = 0

    def mint(self, prefix: str) -> str:
        self._count += 1
        return prefix + hashlib.blake2b(self._count.to_bytes(8), key=self.salt.encode(), digest_size=16).hexdigest()


_RESUME: web.RequestKey[Resume] = web.RequestKey("resume", Resume)
_IDS: web.RequestKey[MintedIds] = web.RequestKey("minted_ids", MintedIds)


def take_resume(request: web.BaseRequest, data: bytes) -> bytes:
    """Return the body without the router's field, which is kept for `resume_of`. Raises ApiError: 400, 403 for a wrong signature."""
    if RESUME_HEADER not in request.headers:
        return data
    fields = decode_or_none(data, dict[str, msgspec.Raw]) or {}
    raw = bytes(fields.pop(RESUME_FIELD, b""))
    if not is_signed(request.headers[RESUME_HEADER], request[SERVICES].spec.secret, raw):
        raise ApiError(403, f"{RESUME_FIELD}: only a router with the worker's --cluster-secret-file may set it")
    resume: Resume | None = decode_or_none(raw, Resume)
    if resume is None:
        raise bad_field(
            RESUME_FIELD, "is not what a router of this version writes; upgrade routers and workers together"
        )
    request[_RESUME] = resume
    return _encode(fields)


def resume_of(request: web.BaseRequest) -> Resume | None:
    """Return what the client of `request` has of the answer already; None: it begins here."""
    return request.get(_RESUME)


def ids_of(request: web.BaseRequest) -> MintedIds:
    ids = request.get(_IDS)
    if ids is None:
        resume = resume_of(request)
        ids = request[_IDS] = MintedIds(secrets.token_hex(16) if resume is None else resume.salt)
    return ids


def going_on(resume: Resume | None, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Return the samples as the first worker ran them, behind their tokens. Raises ApiError(400)."""
    if resume is None:
        return requests
    if not len(requests) == len(resume.names) == len(resume.seeds) == len(resume.output_ids) == len(resume.ended):
        raise bad_field(RESUME_FIELD, f"is of {len(resume.seeds)} samples, and the request has {len(requests)}")
    return [
        msgspec.structs.replace(
            request, rid=name, sampling=msgspec.structs.replace(request.sampling, seed=seed), output_ids=ids
        )
        for request, name, seed, ids in zip(requests, resume.names, resume.seeds, resume.output_ids, strict=True)
    ]


def begun_of(
    request: web.BaseRequest, requests: Sequence[GenerateRequest], *, id: str, groups: Sequence[str], created: int
) -> Begun | None:
    """Return what another worker needs to know of this answer; None: no router asks, or it cannot go on elsewhere."""
    if FRAMES_HEADER not in request.headers or any(r.return_hidden_states for r in requests):
        return None
    return Begun(
        id=id,
        created=created,
        names=[r.rid for r in requests],
        groups=list(groups),
        seeds=[r.sampling.seed or 0 for r in requests],
        salt=ids_of(request).salt,
    )


class Frames:
    """What goes before the next event. Tokens whose text is held back wait for the event that shows it."""

    def __init__(self, begun: Begun) -> None:
        self._waiting = begin_frame(begun)

    def note(self, news: Sequence[tuple[int, TextOutput]]) -> None:
        for index, output in news:
            if output.tokens.new_ids:
                self._waiting += ids_frame(index, output.tokens.new_ids)
            if output.tokens.finish is not None:
                self._waiting += end_frame(index)

    def take(self) -> bytes:
        waiting, self._waiting = self._waiting, b""
        return waiting
