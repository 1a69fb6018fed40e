"""Bodies of other companies' APIs: our extra fields, errors in their terms. Pure."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.frontend.apis.shared.body_reader import EMPTY, BodyReader, Unserved
from engine.frontend.apis.shared.namespaces import PerPrompt
from engine.frontend.bootstraps import Host, Port, Room
from service.http.errors import ApiError


class OwnFields(msgspec.Struct, kw_only=True):
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
    return {name: getattr(body, name) for name in OwnFields.__struct_fields__}


def missing_in(body: type[msgspec.Struct], chat: BodyReader[Any], remedy: str) -> dict[str, Unserved]:
    """Chat fields absent in `body`, to reject instead of ignoring them."""
    only_there = {
        name: Unserved(remedy, (*EMPTY, 1) if name == "n" else EMPTY) for name in sorted(chat.body.__struct_fields__)
    }
    known = body.__struct_fields__
    return {name: refused for name, refused in {**only_there, **chat.refused}.items() if name not in known}


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in ApiErrors. `names`: parts of our names -> theirs, in order."""
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
