"""What the bodies of other companies' APIs have in common: our own fields beside theirs, and errors in their words. Pure."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.frontend.apis.shared.body_reader import EMPTY, BodyReader, Unserved
from engine.frontend.apis.shared.namespaces import PerPrompt
from engine.frontend.bootstraps import Host, Port, Room
from service.http.errors import ApiError


class OwnFields(msgspec.Struct, kw_only=True):
    """Fields of ours that any body may hold."""

    rid: str | None = None
    priority: int | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    bootstrap_host: Host = None
    bootstrap_port: Port = None
    bootstrap_room: Room = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    user: str | None = None


def own_fields(body: OwnFields) -> dict[str, Any]:
    """Return the fields for the ChatBody that the body becomes."""
    return {name: getattr(body, name) for name in OwnFields.__struct_fields__}


def missing_in(body: type[msgspec.Struct], chat: BodyReader[Any], remedy: str) -> dict[str, Unserved]:
    """Fields that a chat has, or refuses, and that `body` has not: no wish is dropped in silence."""
    only_there = {
        name: Unserved(remedy, (*EMPTY, 1) if name == "n" else EMPTY) for name in sorted(chat.body.__struct_fields__)
    }
    known = body.__struct_fields__
    return {name: refused for name, refused in {**only_there, **chat.refused}.items() if name not in known}


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """ApiErrors from inside name fields as the API's clients wrote them. `names`: parts of our names -> theirs, in this order."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    if error.field is None:
        return error
    field = error.field
    for ours, theirs in names.items():
        field = field.replace(ours, theirs)
    message = error.message.replace(error.field, field)
    return ApiError(error.status, message, field=field, code=error.code, retry_after_s=error.retry_after_s)
