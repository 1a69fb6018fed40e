"""The DP rank that a client names: `routed_dp_rank`, or by its older name `data_parallel_rank` (SGLang). Pure."""

from typing import Protocol

from service.http.errors import bad_field


class RoutedFields(Protocol):
    """Fields of a body. A protocol: a msgspec struct has only one base."""

    routed_dp_rank: int | None
    data_parallel_rank: int | None


def routed_rank(body: RoutedFields) -> int | None:
    """Return the rank; None: the server chooses. Raises ApiError(400)."""
    new, old = body.routed_dp_rank, body.data_parallel_rank
    if new is not None and old is not None and new != old:
        raise bad_field("data_parallel_rank", f"is {old}, and routed_dp_rank is {new}; give one of them")
    return old if new is None else new
