"""What can be seen of a real cluster: /metrics against the dashboard, `tandem trace`, JSON logs."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.commands.trace import fetch
from engine.metric_names import GAUGES
from service.telemetry.context import TracesQuery
from tests.e2e.client import generate, session, text_of
from tests.e2e.cluster import Cluster, wait_until
from tests.packages import ROOT

DASHBOARD = ROOT / "deploy" / "monitoring" / "grafana-dashboard.json"
RULES = ROOT / "deploy" / "monitoring" / "alert-rules.yaml"
METRIC = re.compile(r"\b((?:sglang:|vllm:|tandem_|smg_)[a-z0-9_:]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|without) \(([^)]*)\)")
ADDED_BY_PROMETHEUS = {"instance", "job", "le", "namespace"}
CHUNK = 256  # of the fixture
Exported = dict[str, dict[str, set[str]]]  # of each process: the names that it exports, each with its labels
PROMPT = list(range(16, 16 + CHUNK)) * 2 + [40] * 60


async def _served(cluster: Cluster, *, request_id: str, stream: bool = False) -> None:
    prompt = [16 + len(request_id), *PROMPT]  # no prefix of another's
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}, "stream": stream}
    async with session() as http:
        http.headers["X-Request-Id"] = request_id
        await generate(http, cluster.router, body)


async def _prefill_info(cluster: Cluster) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(await text_of(f"{cluster.of('prefill')[0].url}/server_info"))
    return info


def test_the_way_to_each_decode_worker_is_shown_with_its_rate(nixl: Cluster) -> None:
    asyncio.run(_served(nixl, request_id="opens-the-way"))
    paths = asyncio.run(_prefill_info(nixl))["transfer_paths"]
    assert paths and all(path["gb_per_s"] > 0 and path["same_machine"] is True for path in paths)
    assert {path["transport"] for path in paths} <= {"cma", "tcp", "unknown"}
    decode = json.loads(asyncio.run(text_of(f"{nixl.of('decode')[0].url}/server_info")))
    assert "transfer_paths" not in decode


async def _bootstrap_url(cluster: Cluster) -> str:
    info = await _prefill_info(cluster)
    return f"http://127.0.0.1:{info['disaggregation_bootstrap_port']}"


@pytest.fixture(scope="module")
def exported(nixl: Cluster) -> Exported:
    """Labels are empty as long as nothing was counted."""

    async def scrape() -> Exported:
        await _served(nixl, request_id="before-the-scrape", stream=True)
        urls = {worker.role: worker.url for worker in nixl.workers}
        urls |= {"router": nixl.router, "bootstrap": await _bootstrap_url(nixl)}
        return {name: _names(await text_of(f"{url}/metrics")) for name, url in urls.items()}

    return asyncio.run(scrape())


def _names(exposition: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for end in ends:
            found[family.name + end] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]


def assert_exported(exported: Exported, where: str, expression: str) -> None:
    """That each metric of `expression` exists, with the labels that it asks for."""
    known = {name: labels for names in exported.values() for name, labels in names.items()}
    found = METRIC.findall(expression)
    assert found and not {metric for metric, _ in found} - known.keys(), (where, found)
    grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
    for metric, selector in found:
        asked = {re.split(r"[=!]", part)[0].strip() for part in selector.split(", ") if part}
        labels = known[metric] | ADDED_BY_PROMETHEUS
        assert not known[metric] or grouped | asked <= labels, (where, expression, labels)


def test_every_alert_reads_what_is_exported(exported: Exported) -> None:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert_exported(exported, rule["alert"], rule["expr"])


def test_every_panel_shows_what_is_exported(exported: Exported) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for title, expression in _expressions(dashboard):
        assert_exported(exported, title, expression)
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}"), title
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


WORKERS = """num_running_reqs num_queue_reqs num_used_tokens token_usage gen_throughput cache_hit_rate max_total_num_tokens
    num_requests_total num_aborted_requests_total prompt_tokens_total generation_tokens_total cached_tokens_total
    time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
    request_time_per_output_token_seconds_bucket queue_time_seconds_bucket per_stage_req_latency_seconds_bucket new_token_ratio
    http_requests_total http_responses_total http_requests_active num_bootstrap_failed_reqs_total
    num_transfer_failed_reqs_total num_prefill_retries_total"""
PREFILL = """num_prefill_bootstrap_queue_reqs num_prefill_inflight_queue_reqs kv_transfer_speed_gb_s kv_transfer_latency_ms
    kv_transfer_total_mb kv_transfer_bootstrap_ms"""
DECODE = "num_decode_prealloc_queue_reqs num_decode_transfer_queue_reqs num_retracted_reqs pending_prealloc_token_usage"
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prompt_tokens_total
    generation_tokens_total request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
    e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
    request_decode_time_seconds_bucket request_time_per_output_token_seconds_bucket prefix_cache_queries_total
    prefix_cache_hits_total cache_config_info"""
ROUTER = """smg_http_requests_total smg_http_responses_total smg_http_request_duration_seconds_bucket smg_worker_health
    smg_worker_requests_active smg_worker_pool_size"""


def test_the_names_that_users_of_other_servers_know(exported: Exported) -> None:
    """What dashboards, autoscalers and the Gateway API's inference extension ask for."""
    for role, names in (("prefill", f"{WORKERS} {PREFILL}"), ("decode", f"{WORKERS} {DECODE}")):
        wanted = {f"sglang:{name}" for name in names.split()} | {f"vllm:{name}" for name in VLLM.split()}
        assert not wanted - exported[role].keys(), sorted(wanted - exported[role].keys())
    assert not set(ROUTER.split()) - exported["router"].keys()
    assert {"model_name", "engine_type"} <= exported["decode"]["vllm:time_to_first_token_seconds_bucket"]
    assert {"tandem_bootstrap_workers", "tandem_bootstrap_calls_total"} <= exported["bootstrap"].keys()


def test_the_documented_names_are_the_exported_ones(exported: Exported) -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    known = {name for names in exported.values() for name in names}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known}
    written = {
        re.sub(r"_total$", "", name) for name in re.findall(r"`((?:sglang:|vllm:|tandem_|smg_)[a-z0-9_:]+)`", text)
    }
    of_others = {figure.name for key, figure in GAUGES.items() if key.startswith("expert_")}  # this model has none
    of_others.add(GAUGES["decode_share"].name)  # of PD multiplexing
    assert written and not written - families - of_others, sorted(written - families - of_others)


def test_a_trace_of_one_request(nixl: Cluster, tmp_path: Path) -> None:
    asyncio.run(_served(nixl, request_id="the-traced-one"))
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "deploy", "trace", "the-traced-one", "--url", nixl.router, "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and str(file) in done.stdout, done.stderr
    events = json.loads(file.read_text())["traceEvents"]
    _check_schema(events)
    processes = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["decode", "prefill", "router"]
    slices = [(processes[e["pid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    stages = {(process, name): (start, end) for process, name, start, end in slices}
    assert {"router prefill leg", "router decode leg"} <= {" ".join(key) for key in stages}
    for process, names in (
        ("prefill", ("bootstrap", "queue", "prefill", "transfer")),
        ("decode", ("bootstrap", "transfer_queue", "decode")),
    ):
        lines = [stages[process, name] for name in names]
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(lines)), "stages follow one another"
        whole = stages[process, "text_completion recall"]
        assert whole[0] <= lines[0][0] + 1 and lines[-1][1] <= whole[1] + 1
    assert len([s for s in slices if s[:2] == ("prefill", "chunk")]) >= 2
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 2


def _check_schema(events: list[dict[str, Any]]) -> None:
    """What the format asks of the three kinds of events that are written."""
    needed = {
        "X": {"ts", "dur", "cat", "args"},
        "M": {"args"},
        "s": {"id", "ts", "cat"},
        "f": {"id", "ts", "cat", "bp"},
    }
    for event in events:
        assert {"name", "ph", "pid", "tid"} | needed[event["ph"]] <= event.keys()
        assert all(isinstance(event[key], int | float) and event[key] >= 0 for key in ("ts", "dur") if key in event)


def test_the_last_requests_and_unknown_ones(nixl: Cluster, tmp_path: Path) -> None:
    asyncio.run(_served(nixl, request_id="one-before-last"))
    asyncio.run(_served(nixl, request_id="the-last", stream=True))
    found = fetch(nixl.router, TracesQuery(last=1), api_key=None)
    assert {(r.request_id, r.process) for r in found} == {("the-last", p) for p in ("router", "prefill", "decode")}
    (decode,) = [r for r in found if r.process == "decode"]
    assert decode.url == nixl.of("decode")[0].url and decode.attributes["gen_ai.usage.output_tokens"] == 8
    command = [sys.executable, "-m", "deploy", "trace", "never-heard-of", "--url", nixl.router]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "knows nothing of never-heard-of" in done.stderr and not list(tmp_path.iterdir())


def test_json_logs_name_the_request(nixl: Cluster) -> None:
    asyncio.run(_served(nixl, request_id="a-logged-one"))
    logs = {name: nixl.log.parent / "logs" / f"{name}.log" for name in ("router", "prefill-0", "decode-0")}
    for name, log in logs.items():
        wait_until(lambda log=log: "a-logged-one" in log.read_text(), within_s=10, what=f"a line of {name}")  # type: ignore[misc]
        lines = [json.loads(line) for line in log.read_text().splitlines() if "a-logged-one" in line]
        assert all(line["request_id"] == "a-logged-one" for line in lines)
        assert any(line.get("path") == "/generate" and line.get("status") == 200 for line in lines)
        process = {"router": "router", "prefill-0": "prefill", "decode-0": "decode"}[name]
        assert {line["process"] for line in lines} == {process}
