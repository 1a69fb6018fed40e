"""The client's DP rank: `routed_dp_rank`, `data_parallel_rank` (SGLang) or header. Pure."""

from collections.abc import Mapping
from typing import Protocol

from service.http.dp_rank import RANK_HEADER, rank_in
from service.http.errors import bad_field


class RoutedFields(Protocol):
    """A protocol, because msgspec structs have one base."""

    routed_dp_rank: int | None
    data_parallel_rank: int | None


def routed_rank(body: RoutedFields, headers: Mapping[str, str]) -> int | None:
    """Raises ApiError(400)."""
    new, old = body.routed_dp_rank, body.data_parallel_rank
    if new is not None and old is not None and new != old:
        raise bad_field("data_parallel_rank", f"is {old}, and routed_dp_rank is {new}; give one of them")
    name, named = ("data_parallel_rank", old) if new is None else ("routed_dp_rank", new)
    in_header = rank_in(headers)
    if named is not None and in_header is not None and named != in_header:
        raise bad_field(name, f"is {named}, and the header {RANK_HEADER} is {in_header}; give one of them")
    return in_header if named is None else named
