"""Pods to workers: the pure part of service discovery, with literals only."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import DiscoveryFlags, label_query
from router.pool.discovery import GATHER_S, Discovery, PodWorkers
from router.pool.pod_watch import MAX_PODS, PORT_ANNOTATION, Pod, PodError, PodSet, backoff_s, read_pod
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from tests.router.dummies import until


def a_pod(name: str = "a", ip: str = "10.0.0.1", **fields: Any) -> Pod:
    return Pod(**{"name": f"ns/{name}", "uid": name, "ip": ip, "ready": True, "ending": False, **fields})


class Core:
    """The workers of pods in a table of their own; the monitor's calls are listed."""

    def __init__(self, port: int = 80) -> None:
        self.table = WorkerTable()
        self.calls: list[tuple[str, str]] = []
        monitor: Any = SimpleNamespace(
            watch=lambda worker: self.calls.append(("join", worker.url)),
            retire=lambda worker: self.calls.append(("drop", worker.url)),
        )
        self.workers = PodWorkers(self.table, monitor, port)

    def show(self, pods: Sequence[Pod], role: Role = Role.DECODE) -> list[tuple[str, str]]:
        """What changes: workers that join, are dropped, begin to leave."""
        return self.show_all({role: pods})

    def show_all(self, pods: dict[Role, Sequence[Pod]]) -> list[tuple[str, str]]:
        self.calls.clear()
        before = self.leaving()
        self.workers.update(pods, now_s=0.0)
        self.table.check()
        return self.calls + [("leave", url) for url in sorted(self.leaving() - before)]

    def leaving(self) -> set[str]:
        return {worker.url for worker in self.table.workers() if worker.leaving}


URL = "http://10.0.0.1:80"


def test_only_a_pod_that_is_being_deleted_is_a_last_resort_and_only_until_it_is_gone() -> None:
    for pods, last_resort in (([a_pod(ending=True)], True), ([a_pod(ending=True, uid="older")], False), ([], False)):
        core = Core()
        core.show([a_pod()])
        assert core.show(pods) == [("leave", URL)]
        assert core.table.find(URL).last_resort == last_resort
        core.show([])
        assert not core.table.find(URL).last_resort


def test_a_worker_that_is_in_stays_when_its_pod_is_not_ready_for_a_while() -> None:
    core = Core()
    core.show([a_pod()])
    assert core.show([a_pod(ready=False)]) == []
    assert core.show([a_pod(ready=False, uid="other")]) == [("leave", URL)]


def test_another_pod_at_the_same_address_takes_its_place_at_once() -> None:
    core = Core()
    core.show([a_pod()])
    assert core.show([a_pod("b")]) == [("drop", URL), ("join", URL)]
    core.show([])
    assert core.show([a_pod("c")]) == [("drop", URL), ("join", URL)]


def test_a_worker_that_leaves_goes_when_its_requests_have_ended() -> None:
    core = Core()
    core.show([a_pod()])
    lease = core.table.loads.charge(core.table.find(URL), 5)
    core.show([])
    core.workers.reap()
    assert core.workers.counts() == {"workers": 0, "leaving": 1}
    core.table.loads.release(lease)
    core.workers.reap()
    assert core.table.workers() == [] and core.workers.counts() == {"workers": 0, "leaving": 0}


def test_workers_named_or_removed_by_hand_are_left_alone() -> None:
    core = Core()
    named = core.table.add(URL, role=Role.DECODE)
    assert core.show([a_pod()]) == core.show([a_pod("b")]) == core.show([]) == []
    assert core.table.workers() == [named]
    core.table.remove(URL)
    assert core.show([a_pod()]) == [("join", URL)]
    core.table.remove(URL)
    assert core.show([a_pod()]) == core.show([]) == [] and core.table.workers() == []


def test_of_two_pods_with_one_address_the_first_serves_and_the_other_is_reported() -> None:
    core = Core()
    assert core.show([a_pod("a"), a_pod("b")]) == [("join", URL)]
    assert core.workers.problems == {"ns/b": f"pod ns/a has its address {URL}"}
    assert core.show_all({Role.PREFILL: [a_pod()], Role.DECODE: [a_pod()]}) == []
    assert core.workers.problems == {"ns/a": "both selectors choose it; it serves as decode"}


@pytest.mark.parametrize(
    ("text", "port"),
    [(None, None), ("8998", 8998), ("0", "bad"), ("65536", "bad"), ("x", "bad"), ("²", "bad"), ("", "bad")],
)
def test_the_bootstrap_port_comes_from_the_annotation(text: str | None, port: Any) -> None:
    core = Core()
    changes = core.show([a_pod(bootstrap_port=text)], Role.PREFILL)
    if port == "bad":
        assert changes == [] and "bootstrap port must be 1 to 65535" in core.workers.problems["ns/a"]
    else:
        assert core.table.find(URL).bootstrap.port == port
    assert Core().show([a_pod(bootstrap_port=text)])  # none of decode's business


def test_addresses_of_both_families() -> None:
    assert Core(30000).show([a_pod(ip="fd00::5")], Role.UNIFIED) == [("join", "http://[fd00::5]:30000")]


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
    try:
        assert Core().show([read_pod(raw)]) == []
    except PodError as err:
        assert str(err).startswith("not a pod: ")


def test_a_whole_pod_is_read() -> None:
    raw = {
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "uid": "u",
            "annotations": {PORT_ANNOTATION: "1"},
            "deletionTimestamp": "x",
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert read_pod(raw) == a_pod(uid="u", ending=True, bootstrap_port="1")
    raw["metadata"].pop("deletionTimestamp")  # type: ignore[attr-defined]
    raw["status"]["phase"] = "Failed"  # type: ignore[index]
    assert read_pod(raw).ending


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
def test_the_pool_ends_as_the_pods_say_after_any_events(steps: list[tuple[list[Pod], bool]]) -> None:
    """No double join, no leave of a stranger, and the end is right."""
    core = Core()
    for pods, ended in steps:
        core.show(pods)
        if ended:
            core.workers.reap()
            assert not core.leaving()
        core.table.check()
        pool = {worker.url for worker in core.table.workers()} - core.leaving()
        assert core.workers.counts() == {"workers": len(pool), "leaving": len(core.leaving())}
        assert pool >= {f"http://{p.ip}:80" for p in pods if p.ready and p.ip and not p.ending}
        assert pool <= {f"http://{p.ip}:80" for p in pods if p.ip and not p.ending}


def test_pauses_grow_up_to_a_bound() -> None:
    assert [backoff_s(i, 0.999999) for i in range(9)] == pytest.approx([0, 0.25, 0.5, 1, 2, 4, 8, 16, 30], rel=1e-3)
    assert backoff_s(1000, 0.0) == 15.0


def test_selectors_are_written_as_in_sglang() -> None:
    assert label_query(("app=x", "role=prefill")) == label_query(("app=x role=prefill",)) == "app=x,role=prefill"
    assert label_query(()) == ""


async def test_changes_that_come_together_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, the others once: each look is at all pods."""
    looks: list[float] = []
    monkeypatch.setattr(PodWorkers, "update", lambda self, pods, *, now_s: looks.append(now_s))
    absent: Any = None
    discovery = Discovery(DiscoveryFlags(), table=WorkerTable(), monitor=absent, api=absent)
    for _ in range(100):
        discovery._on_change()
    assert len(looks) == 1
    await until(lambda: len(looks) == 2)
    assert looks[1] - looks[0] >= 0.9 * GATHER_S
