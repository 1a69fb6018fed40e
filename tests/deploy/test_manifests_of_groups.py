"""deploy/kubernetes: workers of several pods are groups with one leader, whose flags fit together."""

from disagg.processes.exposure import check_nodes_exposure
from disagg.processes.rendezvous import check_same, flags_of
from engine.flags.nodes import address_of
from engine.flags.rank_rules import check_ranks
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from tests.deploy.test_manifests import reaches, worker_configs
from tools.kubernetes.cluster_objects import of_kind, one, pods


def test_groups_have_one_leader_that_prefills_and_workers_that_decode() -> None:
    (groups,) = of_kind("multi-node", "LeaderWorkerSet")
    template = groups["spec"]["leaderWorkerTemplate"]
    assert template["size"] >= 2 and template["restartPolicy"] == "None"
    assert [p.component for p in pods("multi-node") if p.owner is groups] == ["prefill", "decode"]
    assert [d["metadata"]["name"] for d in of_kind("multi-node", "Deployment")] == ["tandem-router"]
    same = one("nvidia-nixl", "decode").spec
    assert template["workerTemplate"]["spec"] == same


def test_a_worker_of_several_pods_is_a_group_of_nodes() -> None:
    """The flags of its pods are those of one group, as the worker itself compares them."""
    for owner in of_kind("ranks", "LeaderWorkerSet"):
        leader, follower = [found for found in pods("ranks") if found.owner is owner]
        assert owner["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert (leader.serves, follower.serves, follower.role) == (True, False, leader.component)
        (first, server, disagg), (last, _, other) = (worker_configs("ranks", found) for found in (leader, follower))
        check_ranks(first, load_model_config(WIDE_MODEL_PATH))
        check_ranks(last, load_model_config(WIDE_MODEL_PATH))
        assert (first.node_rank, last.node_rank) == (0, first.nnodes - 1) and first.num_ranks % first.nnodes == 0
        check_same(first, disagg, flags_of(last, other), node=last.node_rank)
        check_nodes_exposure(server, first, disagg)
        assert address_of(first)[1] == leader.ports()["ranks"]
        for one_way in ((leader, follower), (follower, leader)):
            assert reaches("ranks", *one_way, "ranks" if one_way[1] is leader else None)
        others = [found for found in pods("ranks") if found.component != "router" and found.owner is not owner]
        assert all(reaches("ranks", found, follower, None) for found in others)  # their transfer engines
        assert not reaches("ranks", one("ranks", "router"), follower, None)
    assert [d["metadata"]["name"] for d in of_kind("ranks", "Deployment")] == ["tandem-router"]


def test_a_pod_without_http_is_ready_when_its_file_says_so() -> None:
    for found in (one("ranks", f"{role}-rank") for role in ("prefill", "decode")):
        ready_file = worker_configs("ranks", found)[1].ready_file
        for probe in ("startupProbe", "readinessProbe"):
            assert found.container[probe]["exec"]["command"] == ["test", "-f", ready_file]
        assert "livenessProbe" not in found.container and not found.ports()
