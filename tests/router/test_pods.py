"""Pods to workers: the pure part of service discovery, with literals only."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig, check_config, label_query
from router.pool.pod_watch import WatchBackoff
from router.pool.pods import MAX_PODS, Change, Drop, Leave, Pod, PodError, PodSet, Reconciler, Wanted, read_pod
from router.pool.states import Check
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.flags import ConfigError

ANNOTATION = "sglang.ai/bootstrap-port"


def a_pod(name: str = "a", ip: str = "10.0.0.1", **fields: Any) -> Pod:
    return Pod(**{"name": f"ns/{name}", "uid": name, "ip": ip, "ready": True, "ending": False, **fields})


def told(changes: Sequence[Change]) -> list[tuple[str, str]]:
    return [("join", c.url) if isinstance(c, Wanted) else (type(c).__name__.lower(), c.url) for c in changes]


URL = "http://10.0.0.1:80"


def test_only_a_pod_that_is_being_deleted_is_a_last_resort() -> None:
    for pods, last_resort in (([a_pod(ending=True)], True), ([a_pod(ending=True, uid="older")], False), ([], False)):
        core = Reconciler(80)
        core.changes({Role.DECODE: [a_pod()]})
        assert core.changes({Role.DECODE: pods}) == [Leave(URL, last_resort)]


def test_a_worker_that_is_in_stays_when_its_pod_is_not_ready_for_a_while() -> None:
    core = Reconciler(80)
    core.changes({Role.DECODE: [a_pod()]})
    assert core.changes({Role.DECODE: [a_pod(ready=False)]}) == []
    assert told(core.changes({Role.DECODE: [a_pod(ready=False, uid="other")]})) == [("leave", URL)]


def test_another_pod_at_the_same_address_takes_its_place_at_once() -> None:
    core = Reconciler(80)
    core.changes({Role.DECODE: [a_pod()]})
    assert told(core.changes({Role.DECODE: [a_pod("b")]})) == [("drop", URL), ("join", URL)]
    core.changes({Role.DECODE: []})
    assert told(core.changes({Role.DECODE: [a_pod("c")]})) == [("drop", URL), ("join", URL)]


def test_of_two_pods_with_one_address_the_first_serves_and_the_other_is_told_of() -> None:
    core = Reconciler(80)
    assert told(core.changes({Role.DECODE: [a_pod("a"), a_pod("b")]})) == [("join", URL)]
    assert core.problems == {"ns/b": f"pod ns/a has its address {URL}"}
    both = {Role.PREFILL: [a_pod()], Role.DECODE: [a_pod()]}
    assert core.changes(both) == []
    assert core.problems == {"ns/a": "both selectors choose it; it serves as decode"}


@pytest.mark.parametrize(
    ("text", "port"),
    [(None, None), ("8998", 8998), ("0", "bad"), ("65536", "bad"), ("x", "bad"), ("²", "bad"), ("", "bad")],
)
def test_the_bootstrap_port_comes_from_the_annotation(text: str | None, port: Any) -> None:
    core = Reconciler(80)
    changes = core.changes({Role.PREFILL: [a_pod(bootstrap_port=text)]})
    if port == "bad":
        assert changes == [] and "bootstrap port must be 1 to 65535" in core.problems["ns/a"]
    else:
        assert isinstance(changes[0], Wanted) and changes[0].bootstrap_port == port
    assert Reconciler(80).changes({Role.DECODE: [a_pod(bootstrap_port=text)]})  # none of decode's business


def test_addresses_of_both_families() -> None:
    assert told(Reconciler(30000).changes({Role.UNIFIED: [a_pod(ip="fd00::5")]})) == [
        ("join", "http://[fd00::5]:30000")
    ]


HALVES: list[Any] = [
    {},
    {"metadata": {"name": "a"}},
    {"metadata": {"name": "a", "namespace": "ns"}, "status": {}},
    {"metadata": {"name": "a"}, "status": {"podIP": "10.0.0.1"}},
    {"metadata": {"name": "a"}, "status": {"conditions": [{}]}},
    {"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}},
    {"metadata": {"name": "a", "annotations": None}, "status": {"podIP": None, "conditions": None}},
    {"metadata": None},
    {"metadata": {"name": 7}},
    {"metadata": {"name": "a"}, "status": {"podIP": ["10.0.0.1"]}},
    [],
    None,
    "pod",
]


@pytest.mark.parametrize("raw", HALVES, ids=repr)
def test_a_pod_with_half_its_fields_is_no_worker_and_no_crash(raw: Any) -> None:
    core = Reconciler(80)
    try:
        assert core.changes({Role.DECODE: [read_pod(raw, annotation=ANNOTATION)]}) == []
    except PodError as err:
        assert str(err).startswith("not a pod: ")


def test_a_whole_pod_is_read() -> None:
    raw = {
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "uid": "u",
            "annotations": {ANNOTATION: "1"},
            "deletionTimestamp": "x",
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert read_pod(raw, annotation=ANNOTATION) == a_pod(uid="u", ending=True, bootstrap_port="1")
    raw["metadata"].pop("deletionTimestamp")  # type: ignore[attr-defined]
    raw["status"]["phase"] = "Failed"  # type: ignore[index]
    assert read_pod(raw, annotation=ANNOTATION).ending


def test_the_set_of_pods_is_bounded_and_a_late_delete_spares_the_next_pod() -> None:
    pods = PodSet()
    pods.replace([a_pod(str(i)) for i in range(MAX_PODS + 3)])
    assert len(pods) == MAX_PODS and pods.num_refused == 3
    pods.put(a_pod("0", ip="10.0.0.9"))  # a known one may change
    assert pods.num_refused == 3 and pods.pods()[0].ip == "10.0.0.9"
    pods.remove(a_pod("0", uid="an older pod of that name"))
    assert len(pods) == MAX_PODS
    pods.remove(a_pod("0"))
    assert len(pods) == MAX_PODS - 1


POD_STATES = st.lists(
    st.builds(
        a_pod,
        st.sampled_from("abc"),
        st.sampled_from(["10.0.0.1", "10.0.0.2", ""]),
        uid=st.sampled_from("12"),
        ready=st.booleans(),
        ending=st.booleans(),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(POD_STATES, st.booleans()), max_size=12))
def test_whatever_comes_the_pool_ends_as_the_pods_say(steps: list[tuple[list[Pod], bool]]) -> None:
    """Changes are applied to a model of the table: no double join, no leave of a stranger, and the end is right."""
    core, pool, leaving = Reconciler(80), set[str](), set[str]()
    pods: list[Pod] = []
    for pods, ended in steps:
        for change in core.changes({Role.DECODE: pods}):
            if isinstance(change, Wanted):
                assert change.url not in pool | leaving
                pool.add(change.url)
            elif isinstance(change, Drop):
                assert change.url in pool | leaving
                pool.discard(change.url)
                leaving.discard(change.url)
            else:
                assert isinstance(change, Leave)
                assert change.url in pool or (change.url in leaving and not change.last_resort)
                pool.discard(change.url)
                leaving.add(change.url)
        for url in sorted(leaving) if ended else []:
            core.left(url)
            leaving.discard(url)
        core.check()
        assert core.num_joined == len(pool)
        assert pool >= {f"http://{p.ip}:80" for p in pods if p.ready and p.ip and not p.ending}
        assert pool <= {f"http://{p.ip}:80" for p in pods if p.ip and not p.ending}


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_success() -> None:
    backoff = WatchBackoff(base_s=1.0, most_s=8.0)
    assert [backoff.failed(0.999999) for _ in range(6)] == pytest.approx([0, 1, 2, 4, 8, 8], rel=1e-3)
    assert WatchBackoff(failures=1000).failed(0.0) == 15.0
    backoff.ok()
    assert backoff.failed(0.5) == 0.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"selector": ("a=b",)}, "--selector: needs --service-discovery"),
        ({"service_discovery": True}, "--selector: --service-discovery needs it"),
        ({"service_discovery": True, "selector": ("a",)}, "--selector: 'a' is not KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a=b",), "decode_selector": ("a=c",)}, "--decode-selector: is for"),
        (
            {"service_discovery": True, "pd_disaggregation": True, "prefill_selector": ("a=b",)},
            "--decode-selector: --service-discovery needs it",
        ),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(")):
        check_config(RouterConfig(**flags))


def test_selectors_are_written_as_in_sglang() -> None:
    assert label_query(("app=x", "role=prefill")) == label_query(("app=x role=prefill",)) == "app=x,role=prefill"
    assert label_query(()) == ""


def test_a_retired_worker_gets_nothing_new_whatever_its_health() -> None:
    table = WorkerTable()
    worker = table.add(URL, role=Role.DECODE)
    table.on_check(worker, Check.OK, now_s=0.0)
    lease = table.loads.charge(worker, 5)
    table.retire(URL)
    table.on_check(worker, Check.OK, now_s=1.0)
    assert table.alive(Role.DECODE) == [] and table.workers() == [worker]
    table.retire(URL, last_resort=True)
    assert table.alive(Role.DECODE) == [worker]  # better than nobody
    other = table.add("http://h:2", role=Role.DECODE)
    assert table.alive(Role.DECODE) == [worker]
    table.on_check(other, Check.OK, now_s=2.0)
    assert table.alive(Role.DECODE) == [other]
    table.loads.release(lease)
    table.check()
