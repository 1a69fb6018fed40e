"""What the bodies of other companies' APIs have in common: our own fields beside theirs, and errors in their words. Pure."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.frontend.apis.shared.namespaces import PerPrompt
from engine.frontend.bootstraps import Host, Port, Room
from service.http.errors import ApiError


class OwnFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of ours that any body may hold. Another unknown field is a 400."""

    rid: str | None = None
    priority: int | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    bootstrap_host: Host = None
    bootstrap_port: Port = None
    bootstrap_room: Room = None
    user: str | None = None
    session_id: Any = None
    session_params: Any = None
    routing_key: Any = None


_OF_THE_ROUTER = ("session_id", "session_params", "routing_key")
_PASSED = tuple(name for name in OwnFields.__struct_fields__ if name not in _OF_THE_ROUTER)


def own_fields(body: OwnFields) -> dict[str, Any]:
    """For the ChatBody that the body is written into."""
    return {name: getattr(body, name) for name in _PASSED}


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
