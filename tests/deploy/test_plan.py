"""Which processes a cluster has, and what is said about it: literals only."""

import argparse
import io
from pathlib import Path

import pytest

from deploy.commands.up import own_secret
from deploy.launcher import display as summary
from deploy.launcher.display import PlainDisplay, ProcessProgress, render
from deploy.launcher.guard import watch
from deploy.launcher.plan import ProcessSpec, num_ports, plan_cluster
from deploy.launcher.roles import ClusterConfig, RoleFlags
from service.flags import ConfigError
from service.http.listening import require_free
from service.security.keys import ROUTER_SECRET, router_secret

FREE = (1, 11, 2, 12, 3, 13)


def by_name(specs: list[ProcessSpec]) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in specs}


def test_workers_know_their_router_by_a_secret_that_no_one_has_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROUTER_SECRET, raising=False)
    one, two = (own_secret(ClusterConfig(), argparse.Namespace())[ROUTER_SECRET] for _ in range(2))
    assert len(one) == 64 and one != two and router_secret(None) is None
    assert own_secret(ClusterConfig(unified=True), argparse.Namespace()) == {}
    assert own_secret(ClusterConfig(), argparse.Namespace(cluster_secret_file="of the cluster")) == {}
    monkeypatch.setenv(ROUTER_SECRET, one)
    assert own_secret(ClusterConfig(), argparse.Namespace()) == {}
    assert router_secret(None) == one.encode() and router_secret(b"of the cluster") == b"of the cluster"


def test_two_prefill_one_decode_and_a_router_that_knows_them() -> None:
    config = ClusterConfig(prefill=2, decode=1, transfer_backend="mooncake")
    specs = by_name(
        plan_cluster(
            config,
            front=8000,
            free=FREE,
            cores=7,
            flags={"prefill": RoleFlags(args=["--page-size=1"])},
            router_args=["--policy=random"],
        )
    )
    assert list(specs) == ["prefill-0", "prefill-1", "decode-0", "router"]
    prefill, router = specs["prefill-1"].argv, specs["router"].argv
    assert prefill[prefill.index("serve") :] == (
        "serve",
        "--disaggregation-mode=prefill",
        "--host=127.0.0.1",
        "--port=2",
        "--disaggregation-bootstrap-port=12",
        "--disaggregation-transfer-backend=mooncake",
        "--page-size=1",
    )
    assert " ".join(router).endswith(
        "--pd-disaggregation --prefill http://127.0.0.1:1 11 --prefill http://127.0.0.1:2 12"
        " --decode http://127.0.0.1:3 --policy=random"
    )
    assert (
        specs["decode-0"].env["OMP_NUM_THREADS"] == "7"
    )  # of C kernels, which do not wait for a thread without a core
    assert specs["decode-0"].env["OMP_THREAD_LIMIT"] == "2"  # of torch: a third of seven
    assert specs["decode-0"].env["GOMP_SPINCOUNT"] == "0"  # several engines, the same cores


def test_encoder_workers_beside_them() -> None:
    config = ClusterConfig(encode=2, transfer_backend="mooncake")
    flags = {"encode": RoleFlags(args=["--page-size=1"])}
    specs = by_name(plan_cluster(config, front=8000, free=FREE, cores=10, flags=flags))
    assert num_ports(config) == len(FREE)
    assert list(specs) == ["prefill-0", "decode-0", "encode-0", "encode-1", "router"]
    worker = specs["encode-1"].argv
    assert worker[worker.index("serve") :] == (
        "serve",
        "--disaggregation-mode=encode",
        "--host=127.0.0.1",
        "--port=13",
        "--disaggregation-transfer-backend=mooncake",
        "--page-size=1",
    )
    assert specs["encode-1"].env["OMP_THREAD_LIMIT"] == "2"
    ends = "--encode http://127.0.0.1:3 --encode http://127.0.0.1:13"
    assert " ".join(specs["router"].argv).endswith(ends)


def test_unified_is_one_worker_at_the_front_port() -> None:
    config = ClusterConfig(unified=True, host="0.0.0.0")
    (spec,) = plan_cluster(config, front=8000, free=(), cores=4)
    assert num_ports(config) == 0
    assert spec.url == "http://127.0.0.1:8000" and "--host=0.0.0.0" in spec.argv and spec.role == "unified"


def test_ports_are_dealt_out_once_each() -> None:
    config = ClusterConfig(prefill=2, decode=3)
    *workers, router = plan_cluster(config, front=9, free=range(100, 100 + num_ports(config)), cores=1)
    taken = [[arg.rpartition("=")[2] for arg in spec.argv if "port=" in arg] for spec in workers]
    assert taken == [["100", "101"], ["102", "103"], ["104", "105"], ["106", "107"], ["108", "109"]]
    assert "--port=9" in router.argv


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--port: cannot listen on 192\.0\.2\.1:80"):
        require_free("192.0.2.1", 80, flag="--port")


def test_guard_remembers_what_was_not_forgotten() -> None:
    assert watch(io.StringIO("+10\n+11\n-10\njunk\n+x\n")) == {11}


def test_a_percentage_in_the_log_fills_the_bar() -> None:
    (line,) = render(
        [
            ProcessProgress(
                name="decode-0",
                text="2026-11-29 01:27:43,484 decode scheduler INFO loading weights: 4 of 8 (50%) in 1 s",
                elapsed_s=1.0,
            )
        ]
    )
    assert line.startswith("decode-0  [██████████░░░░░░░░░░]   1.0 s  loading weights")
    (plain,) = render(
        [ProcessProgress(name="w", text="2026-11-21 00:38:10,053 worker INFO model loaded", elapsed_s=0.0)]
    )
    assert plain.endswith("0.0 s  model loaded")
    (done,) = render([ProcessProgress(name="decode-0", text="", elapsed_s=2.0, healthy_s=1.5)])
    assert done.endswith("healthy after 1.5 s")


def test_plain_display_says_each_thing_once() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    for healthy_s in (None, None, 1.0, 1.0):
        display.update([ProcessProgress(name="w", text="", elapsed_s=0.0, healthy_s=healthy_s)])
    assert out.getvalue() == "w: starting\nw: healthy after 1.0 s\n"


MEMBERS = [
    summary.Member(name="encode-0", role="encode", url="http://e", pid=4, info={"max_total_num_tokens": 2048}),
    summary.Member(
        name="prefill-0",
        role="prefill",
        url="http://p",
        pid=5,
        info={"max_total_num_tokens": 12345, "tp_size": 2, "dp_size": 1},
    ),
    summary.Member(name="router", role="router", url="http://r", pid=6, info={}),
]


def test_summary_has_capacity_logs_and_a_curl_line_to_paste() -> None:
    text = summary.summary_text(
        MEMBERS, front="http://r", backend="nixl", log_dir=Path("/logs"), model="recall", shipped=True, auth=True
    )
    assert (
        "features of 2,048 tokens\n" in text
        and "KV 12,345 tokens, TP 2\n" in text
        and "/logs" in text
        and "nixl" in text
    )
    assert "curl -s http://r/v1/chat/completions -H 'Authorization: Bearer KEY'" in text
    assert '"content": "k17 v42 k03 v91 k17"' in text and "v42" in text
