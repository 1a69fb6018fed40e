"""The router's pure parts: the worker table, rooms, policies, reports, flags."""

import re
from typing import Any

import pytest

from router.attempts.pair_attempt import RoomMinter
from router.config import HealthFlags, RouterConfig, check_config
from router.pool.breaker import HEALTH_TRANSITIONS, Check, Health
from router.pool.reports import parse_bootstrap, parse_load
from router.pool.worker import LoadReport, Role
from router.pool.workers import WorkerTable, WorkerTableError
from router.requests.answer import no_worker
from service.flags import ConfigError
from tests.router.dummies import table_of


def test_every_cell_of_the_health_table_is_there() -> None:
    assert set(HEALTH_TRANSITIONS) == {(health, check) for health in Health for check in Check}
    assert all(threshold == "" or hasattr(HealthFlags(), threshold) for _, threshold in HEALTH_TRANSITIONS.values())
    assert all(
        state is not Health.STARTING or now is Health.STARTING for (now, _), (state, _) in HEALTH_TRANSITIONS.items()
    )


def test_a_worker_leaves_after_two_failures_and_comes_back_after_one_success() -> None:
    table = table_of(1)
    worker = table.workers()[0]
    assert not table.on_check(worker, Check.FAILED, now_s=1.0)
    assert not table.on_check(worker, Check.OK, now_s=2.0)
    assert not table.on_check(worker, Check.FAILED, now_s=3.0) and table.on_silence(worker, True)
    assert table.on_check(worker, Check.FAILED, now_s=4.0, error="/health answers 500")
    assert table.alive(Role.DECODE) == [] and worker.checks.changed_s == 4.0 and not worker.silent
    error = no_worker(table, [Role.DECODE])
    assert error.message == "no decode worker is alive (http://h0:1: /health answers 500)"
    assert table.on_check(worker, Check.OK, now_s=5.0)
    assert table.alive(Role.DECODE) == [worker]


def test_success_threshold_counts_good_checks_in_a_row() -> None:
    table = WorkerTable(HealthFlags(health_success_threshold=2))
    worker = table.add("http://h:1/", role=Role.UNIFIED)
    for check, health in (
        (Check.OK, Health.STARTING),
        (Check.FAILED, Health.STARTING),
        (Check.OK, Health.STARTING),
        (Check.OK, Health.UP),
    ):
        table.on_check(worker, check, now_s=0.0)
        assert worker.health is health


def test_urls_are_unique_and_a_removed_worker_still_takes_its_leases_back() -> None:
    table = table_of(1)
    with pytest.raises(WorkerTableError, match="already"):
        table.add("http://h0:1/", role=Role.PREFILL)
    lease = table.loads.charge(table.workers()[0], 7)
    removed = table.remove("http://h0:1")
    again = table.add("http://h0:1", role=Role.DECODE)
    table.check()
    table.loads.release(lease)
    table.loads.release(lease)
    assert (removed.inflight_tokens, again.inflight_tokens, again.worker_id) == (0, 0, 1)
    with pytest.raises(WorkerTableError, match="not in the table"):
        table.remove("http://other:1")


def test_reported_load_counts_only_what_others_sent() -> None:
    table = table_of(1)
    worker = table.workers()[0]
    lease = table.loads.charge(worker, 100)
    table.loads.on_report(worker, LoadReport(used_tokens=80, waiting_tokens=60))
    assert worker.load_tokens == 140
    table.loads.release(lease)
    assert worker.load_tokens == 40
    table.loads.on_report(worker, None)
    assert worker.load_tokens == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.ENCODE])
def test_what_is_cached_is_no_load_of_workers_that_answer_no_client(role: Role) -> None:
    table = table_of(1, role=role)
    table.loads.on_report(table.workers()[0], LoadReport(used_tokens=10_000, waiting_tokens=5))
    assert table.workers()[0].load_tokens == 5


def test_rooms_are_never_zero_and_never_live_twice() -> None:
    draws = iter([0, 5, 5, 5, 6, 5])
    minter = RoomMinter(lambda bits: next(draws))
    assert minter.mint(2) == (5, 6)
    minter.release((5,))
    assert minter.mint(1) == (5,)
    minter.check()
    assert minter.num_live == 2


def test_rooms_of_a_dp_rank_leave_it_when_divided() -> None:
    draws = iter([2**63 - 1, 0, 5, 3, 4, 9])
    minter = RoomMinter(lambda bits: next(draws))
    assert minter.mint(1, rank=2, num_ranks=3) == (2,)  # 2**63 - 1 is moved out of the range, and drawn again
    assert minter.mint(2, rank=2, num_ranks=3) == (5, 11)  # 3 and 4 are moved to 5, too
    minter.check()


OF_ONE = {
    "num_running_reqs": 1,
    "disaggregation": {"prefill_inflight_queue_reqs": 2, "kv_transfer_speed_gb_s": 1.5},
    "totals": {"prompt_tokens": 7, "cached_tokens": 6, "generation_tokens": 8, "kv_transfer_bytes": 9},
}
OF_ANOTHER = {
    "num_running_reqs": 3,
    "disaggregation": {"prefill_inflight_queue_reqs": 4, "kv_transfer_latency_ms": "soon"},
    "totals": "many",
}
DRAFTS = [{"num_running_reqs": 1, "speculative": {"accept_length": length}} for length in (3.5, 2.5, "x")]
PENDING = {"disaggregation": {"pending_prealloc_token_usage": 0.25}, "totals": {"busy_ms": 700}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            {"num_running_reqs": 2, "num_used_tokens": 9},
            LoadReport(running_reqs=2, used_tokens=9, stages={"running": 2}),
        ),
        ([{"num_reqs": 1, "num_tokens": 5}, {"num_tokens": 6}], LoadReport(running_reqs=1, used_tokens=11)),
        (
            {"loads": [{"num_waiting_reqs": 3, "num_waiting_uncached_tokens": 70, "max_total_num_tokens": 8}]},
            LoadReport(waiting_reqs=3, waiting_tokens=70, capacity_tokens=8, stages={"waiting": 3}),
        ),
        ({"num_used_tokens": -4, "num_waiting_reqs": "x"}, LoadReport(stages={"waiting": 0})),
        (
            {"loads": [OF_ONE, OF_ANOTHER]},
            LoadReport(
                **{"running_reqs": 4, "stages": {"inflight": 6, "running": 4}, "transfer_gb_s": 1.5},
                **{"prompt_tokens_total": 7, "cached_tokens_total": 6, "output_tokens_total": 8, "kv_bytes_total": 9},
            ),
        ),
        (
            {"num_running_reqs": 1, "max_running_requests": 32, "max_total_num_tokens": 1000, **PENDING},
            LoadReport(
                **{"running_reqs": 1, "max_running_reqs": 32, "capacity_tokens": 1000, "stages": {"running": 1}},
                **{"pending_tokens": 250, "busy_ms_total": 700},
            ),
        ),
        ({"loads": DRAFTS}, LoadReport(running_reqs=3, stages={"running": 3}, accept_length=3.0)),
        ({"hello": 1}, None),
        (None, None),
        ([1, 2], None),
    ],
)
def test_load_reports(answer: object, expected: LoadReport | None) -> None:
    assert parse_load(answer) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"disaggregation_bootstrap_port": 8998}, ("h", 8998)),
        ({"disaggregation_bootstrap_port": 8998, "disaggregation_bootstrap_server": "10.0.0.9:77"}, ("10.0.0.9", 77)),
        ({"disaggregation_bootstrap_server": "[::1]:77"}, ("::1", 77)),
        ({"disaggregation_bootstrap_server": None, "disaggregation_bootstrap_port": 0}, ("h", None)),
        ({"disaggregation_bootstrap_port": "8998"}, ("h", None)),
        ({}, ("h", None)),
    ],
)
def test_where_the_bootstrap_server_is(info: dict[str, Any], expected: tuple[str, int | None]) -> None:
    assert parse_bootstrap(info, url_host="h") == expected


PAIRS: dict[str, Any] = {"pd_disaggregation": True, "prefill": (("http://p", None),), "decode": ("http://d",)}
FOUND: dict[str, Any] = {"pd_disaggregation": True, "service_discovery": True, "prefill_selector": ("a=b",)}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"decode": ("http://h:1",)}, "--prefill/--decode: "),
        ({"pd_disaggregation": True, "decode": ("h:1",)}, "--decode: "),
        ({"pd_disaggregation": True, "decode": ("http://h:99999",)}, "--decode: "),
        ({"pd_disaggregation": True, "prefill": (("ftp://h:1", None),)}, "--prefill: "),
        ({"pd_disaggregation": True, "prefill": (("http://h:1", 70000),)}, "--prefill: "),
        ({"decode_policy": "random"}, "--decode-policy: "),
        ({"auto_roles": True}, "--auto-roles: needs --pd-disaggregation"),
        (
            {"pd_disaggregation": True, "auto_roles": True, "load_poll_interval_s": 0.0},
            "--auto-roles: goes by what workers report",
        ),
        (
            {"pd_disaggregation": True, "auto_roles_leave": 0.9},
            "--auto-roles-leave: must be below --auto-roles-enter (0.9), got 0.9",
        ),
        ({"selector": ("a=b",)}, "--selector: needs --service-discovery"),
        ({"service_discovery": True}, "--selector: --service-discovery needs it"),
        ({"service_discovery": True, "selector": ("a",)}, "--selector: 'a' is not KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a=b",), "decode_selector": ("a=c",)}, "--decode-selector: is for"),
        (FOUND, "--decode-selector: --service-discovery needs it"),
        ({**FOUND, "selector": ("a=b",)}, "--decode-selector: --service-discovery needs it"),
        ({"route": "pair", "worker_urls": ("http://a:1",)}, "--route: needs --pd-disaggregation"),
        *(({"encode": ("e:1",), **more}, "--encode: 'e:1' is not a worker's address") for more in ({}, PAIRS)),
        *(
            ({"encode_selector": ("a=b",), **more}, "--encode-selector: needs --service-discovery")
            for more in ({}, PAIRS)
        ),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}"):
        check_config(RouterConfig(**flags))
