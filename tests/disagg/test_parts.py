"""A role and its parts: who is asked first, and what becomes of reports."""

import pytest

from disagg.role import PartedRole, PeerPart
from engine.core.outputs import refused
from engine.messages import FinishReason, TokenOutput
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.disagg.two_roles import Cluster
from transfer_backends.contract import RecomputeRequest, Work

GONE = FinishReason(kind="abort", message="the client has gone")


class Noted(PeerPart):
    """Notes what it is asked in `log`, and has the requests `own`."""

    def __init__(self, name: str, log: list[str], *, own: tuple[str, ...] = ()) -> None:
        self.name, self.log, self.own = name, log, own

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        self.log.append(f"{self.name} ends {rid}")
        return [refused(request_of([1], rid=rid), reason)] if rid in self.own else None

    def poll(self, now_s: float) -> list[TokenOutput]:
        self.log.append(f"{self.name} polls")
        return [refused(request_of([1], rid=self.name), GONE)]

    def counters(self) -> dict[str, float]:
        return {"kv_checksum_verified": 1, f"{self.name}_counts": 2}


def role_of(*owners: tuple[str, ...]) -> tuple[PartedRole, list[str]]:
    log: list[str] = []
    parts = [Noted(f"part{i}", log, own=own) for i, own in enumerate(owners)]
    return PartedRole(EngineInATest(num_pages=9).scheduler, parts), log


def test_parts_are_asked_in_order_until_one_has_the_request() -> None:
    role, log = role_of((), ("r",), ("r",))
    (output,) = role.abort("r", 0.0, GONE)
    assert output.finish is GONE and log == ["part0 ends r", "part1 ends r"]


def test_a_request_that_no_part_has_is_the_scheduler_s() -> None:
    role, log = role_of((), ())
    assert role.add(request_of([1, 2], rid="r", max_new_tokens=1), 0.0) == []
    assert [output.rid for output in role.abort("r", 0.0, GONE)] == ["r"]
    assert log == ["part0 ends r", "part1 ends r"]


def test_every_part_is_polled_in_order() -> None:
    role, log = role_of((), ())
    assert [output.rid for output in role.poll(0.0)] == ["part0", "part1"] and log == ["part0 polls", "part1 polls"]


def test_counters_of_parts_with_equal_names_add_up() -> None:
    role, _ = role_of((), ())
    assert role.counters() == {"kv_checksum_verified": 2, "part0_counts": 2, "part1_counts": 2}


def test_a_peer_s_request_that_no_part_takes_is_a_fault() -> None:
    role = Cluster(pages=(9, 9)).prefill.role
    role.parts = ()
    with pytest.raises(AssertionError, match="room 5: no part takes"):
        role.take(RecomputeRequest(5, 1, Work(tokens=[1])), 0.0)  # type: ignore[union-attr]
