"""deploy/kubernetes: valid for three Kubernetes versions, every reference resolves, every command line is a real one."""

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from deploy.commands import router as router_command
from deploy.commands import serve as serve_command
from deploy.flags import config_from
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig
from engine.flags.hicache import mooncake_store
from engine.frontend.routes import ROUTES
from engine.frontend.routes import need_of as worker_need_of
from engine.metric_names import QUEUES
from router.compose.routes import need_of as router_need_of
from router.config import RouterConfig, check_config, label_query
from router.http.health_api import PROBES
from router.pool.pod_watch import PORT_ANNOTATION
from router.server import SHUTDOWN_TIMEOUT_S
from service.security.keys import Access
from tests.deploy.schemas import VERSIONS, faults
from tools.kubernetes.cluster_objects import (
    EXAMPLE_IP,
    STORE,
    Object,
    Pods,
    all_pods,
    command_line,
    environment,
    load,
    named,
    of_kind,
    one,
    pods,
    selects,
)
from tools.kubernetes.render import (
    KEYS,
    OPERATOR_RULES,
    RENDERED,
    RULES,
    SOURCES,
    first_line,
    operator_rules,
    overlays,
    warnings_of,
)

WORKER_GETS = {route.path for route in ROUTES if route.method == "GET"}
OVERLAYS = overlays()
GPU = ("nvidia-nixl", "nvidia-mooncake-rdma", "multi-node", "autoscaling", "autoscaling-keda", "encoders")
THREE_POOLS = "encoders"
CLAIMS = {("tandem-models", True), ("tandem-kernels", False)}
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def test_what_is_tested_is_what_kustomize_builds_now() -> None:
    for name in OVERLAYS:
        with (RENDERED / f"{name}.yaml").open() as lines:
            assert next(lines) == first_line(), f"{name}: run `make manifests`"
    assert sorted(path.stem for path in RENDERED.glob("*.yaml")) == OVERLAYS


def test_the_operator_has_the_alerts_that_prometheus_has() -> None:
    assert OPERATOR_RULES.read_text() == operator_rules(), "run `make manifests`"


def test_every_overlay_of_the_plan_is_there() -> None:
    assert {"cpu-demo", "monitoring", "shared-store", "tracing", "ranks", *GPU} == set(OVERLAYS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for(version: str) -> None:
    seen: set[str] = set()
    for overlay in OVERLAYS:
        for document in [*load(overlay), *map(pod_template, pods(overlay))]:
            text = json.dumps(document, sort_keys=True)
            if text not in seen:
                seen.add(text)
                assert faults(document, version) == [], (overlay, document["kind"], document["metadata"]["name"])
    assert len(seen) > 30


def pod_template(found: Pods) -> Object:
    """Pods of custom resources, in a kind that the schemas know."""
    kind = {"apiVersion": "v1", "kind": "PodTemplate"}
    return {**kind, "metadata": {"name": found.component}, "template": found.template}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_see_faults(version: str) -> None:
    deployment = json.loads(json.dumps(named("cpu-demo", "Deployment", "tandem-decode")))
    deployment["spec"]["template"]["spec"]["containers"][0]["lifeCycle"] = {}
    deployment["spec"]["replicas"] = "1"
    assert len(faults(deployment, version)) == 2
    lws = json.loads(json.dumps(of_kind("multi-node", "LeaderWorkerSet")[0]))
    lws["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    assert len(faults(lws, version)) == 1


@each_overlay
def test_every_container_s_command_is_parsed_by_the_real_parser(overlay: str) -> None:
    for found in pods(overlay):
        words = command_line(overlay, found)
        assert "$(" not in " ".join(words), (found.component, words)
        if found.component == "router":
            check_config(router_config(overlay))
        else:
            engine, server, disagg = worker_configs(overlay, found)
            assert disagg.disaggregation_mode == found.role
            assert server.host == "0.0.0.0" and (not found.serves or server.port == found.ports()["http"])
            assert disagg.disaggregation_control_host == EXAMPLE_IP
            assert disagg.disaggregation_transfer_backend == ("mooncake" if "mooncake" in overlay else "nixl")
            assert engine.device == ("cuda" if overlay in GPU else "auto")


def router_config(overlay: str) -> RouterConfig:
    words = command_line(overlay, one(overlay, "router"))
    assert words[:2] == ["tandem", "router"]
    return router_command.config_of(router_command.build_parser().parse_strict(words[2:]))


def worker_configs(overlay: str, found: Pods) -> tuple[EngineConfig, ServerConfig, DisaggConfig]:
    words = command_line(overlay, found)
    assert words[:2] == ["tandem", "serve"]
    args = serve_command.build_parser().parse_strict(words[2:])
    return config_from(args, EngineConfig), config_from(args, ServerConfig), config_from(args, DisaggConfig)


@each_overlay
def test_images_are_pinned_and_have_what_the_flags_ask_for(overlay: str) -> None:
    """The extras that a Dockerfile installs cover those without which a flag of the overlay is refused at the start."""
    for found in pods(overlay):
        name, _, tag = found.container["image"].partition(":")
        image = "router" if found.component == "router" else "worker-cuda" if overlay in GPU else "worker-cpu"
        assert name == f"tandem-{image}" and re.fullmatch(r"\d+\.\d+\.\d+", tag)
        (installed,) = re.findall(r'"\.\[([^]]+)\]"', (SOURCES.parent / "docker" / f"{image}.Dockerfile").read_text())
        extras = {re.sub(r"-(cpu|cu13)$", "", name) for name in installed.split(",")}
        assert needed_extras(overlay, found) <= extras, (found.component, image)


def needed_extras(overlay: str, found: Pods) -> set[str]:
    if found.component == "router":
        router = router_config(overlay)
        needed = {"k8s"} if router.service_discovery else set()
        spans = router.enable_trace or router.otlp_traces_endpoint
    else:
        _, server, disagg = worker_configs(overlay, found)
        needed = {"engine", disagg.disaggregation_transfer_backend}
        spans = server.enable_trace or server.otlp_traces_endpoint
    return needed | ({"otel"} if spans else set())


def test_spans_have_a_way_out_to_the_collector() -> None:
    """Its namespace and port, for every pod; nothing else that was closed is open."""
    (policy,) = [p for p in of_kind("tracing", "NetworkPolicy") if p["metadata"]["name"] == "tandem-spans"]
    (rule,) = policy["spec"]["egress"]
    for found in pods("tracing"):
        assert selects(policy["spec"]["podSelector"], found.labels)
        flag = next(word for word in command_line("tracing", found) if word.startswith("--otlp-traces-endpoint="))
        address = urlsplit(flag.partition("=")[2])
        assert address.hostname is not None and address.hostname.split(".")[1:] == ["observability", "svc"]
        assert [port["port"] for port in rule["ports"]] == [address.port]
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}
    assert rule["to"] == [{"namespaceSelector": namespace}] and policy["spec"]["policyTypes"] == ["Egress"]


@each_overlay
def test_the_router_s_selectors_choose_its_workers_and_no_other_pod(overlay: str) -> None:
    config = router_config(overlay)
    assert config.service_discovery and config.service_discovery_namespace == "tandem"
    selectors = {"prefill": config.prefill_selector, "decode": config.decode_selector, "encode": config.encode_selector}
    assert bool(selectors["encode"]) == (overlay == THREE_POOLS)
    for component in workers_of(overlay):
        parts = selectors[component]
        wanted = dict(part.split("=") for part in label_query(parts).split(","))
        assert [p.component for p in pods(overlay) if selects(wanted, p.labels)] == [component]
        assert one(overlay, component).ports()["http"] == config.service_discovery_port
    prefill = one(overlay, "prefill")
    port = worker_configs(overlay, prefill)[2].disaggregation_bootstrap_port
    assert prefill.annotations[PORT_ANNOTATION] == str(port)
    assert prefill.ports()["bootstrap"] == port


def workers_of(overlay: str) -> list[str]:
    return ["prefill", "decode", *(["encode"] if overlay == THREE_POOLS else [])]


def test_workers_ask_encoder_workers_where_there_are_any() -> None:
    for overlay in OVERLAYS:
        for role in ("prefill", "decode"):  # one may become the other
            assert worker_configs(overlay, one(overlay, role))[2].feature_fetch == (overlay == THREE_POOLS)


@each_overlay
def test_only_the_router_may_ask_the_api_server_and_only_about_pods(overlay: str) -> None:
    (role,), (binding,) = of_kind(overlay, "Role"), of_kind(overlay, "RoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert not of_kind(overlay, "ClusterRole") and not of_kind(overlay, "ClusterRoleBinding")
    for found in pods(overlay):
        account = found.spec["serviceAccountName"]
        named(overlay, "ServiceAccount", account)
        bound = account in [subject["name"] for subject in binding["subjects"]]
        assert bound == found.spec["automountServiceAccountToken"] == (found.component == "router")


@each_overlay
def test_every_reference_resolves(overlay: str) -> None:
    for found in pods(overlay):
        volumes = {volume["name"]: volume for volume in found.spec["volumes"]}
        mounts = [mount["name"] for mount in found.container["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes), found.component
        for volume in volumes.values():
            check_volume(overlay, volume)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe") if found.serves else ():
            assert found.container[probe]["httpGet"]["port"] in found.ports()
    for service in of_kind(overlay, "Service"):
        (chosen,) = [p for p in all_pods(overlay) if selects(service["spec"]["selector"], p.labels)]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in chosen.ports(), service["metadata"]["name"]
            assert service["spec"].get("clusterIP") != "None" or port["port"] == chosen.ports()[port["targetPort"]]
    for deployment in of_kind(overlay, "Deployment"):
        assert selects(deployment["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"])


def test_workers_share_the_store_whose_master_is_there() -> None:
    overlay = "shared-store"
    (master,) = [found for found in all_pods(overlay) if found.component == STORE]
    assert master.container["command"] == ["mooncake_master"]
    assert f"--rpc_port={master.ports()['store']}" in master.container["args"]
    assert master.container["image"] == one(overlay, "prefill").container["image"]
    for role in ("prefill", "decode"):
        worker = one(overlay, role)
        engine, _, _ = worker_configs(overlay, worker)
        assert engine.enable_hierarchical_cache and engine.hicache_storage_backend == "mooncake"
        where = mooncake_store(engine, environment(overlay, worker)).master_server_address
        service, _, port = where.partition(":")
        ports = [one["port"] for one in named(overlay, "Service", service)["spec"]["ports"]]
        assert [int(port)] == ports == [master.ports()["store"]]
        assert reaches(overlay, worker, master, "store") and reaches(overlay, worker, one(overlay, "decode"), "http")
    assert not reaches(overlay, one(overlay, "router"), master, "store")


def check_volume(overlay: str, volume: Object) -> None:
    if "secret" in volume:
        assert sorted(named(overlay, "Secret", volume["secret"]["secretName"])["data"]) == sorted(KEYS)
    elif "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]  # the user's own, as the docs say
        assert (claim["claimName"], claim.get("readOnly", False)) in CLAIMS
    else:
        assert "sizeLimit" in volume["emptyDir"]


@each_overlay
def test_files_that_flags_name_are_mounted(overlay: str) -> None:
    for found in pods(overlay):
        mounts = {mount["mountPath"]: mount for mount in found.container["volumeMounts"]}
        words = [word for word in command_line(overlay, found) if not word.startswith("--ready-file=/tmp/")]
        paths = [word.partition("=")[2] for word in words if "=/" in word]
        assert len(paths) >= 3
        for path in map(Path, paths):
            assert str(path.parent) in mounts and mounts[str(path.parent)]["readOnly"]
            assert path.name in KEYS or str(path) == "/models/model"
        assert "readOnly" not in mounts["/tmp"]


@each_overlay
def test_everything_is_in_the_namespace(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    names = [(o["kind"], o["metadata"]["name"]) for o in load(overlay)]
    assert len(set(names)) == len(names)
    for found in load(overlay):
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == namespace["metadata"]["name"], found
    subjects = [s for b in of_kind(overlay, "RoleBinding") for s in b["subjects"]]
    assert all(subject["namespace"] == "tandem" for subject in subjects)


@each_overlay
def test_disruption_budgets_and_policies_name_pods_that_there_are(overlay: str) -> None:
    budgets = of_kind(overlay, "PodDisruptionBudget")
    for found in pods(overlay):
        assert len([b for b in budgets if selects(b["spec"]["selector"], found.labels)]) == 1
        guarding = [p for p in of_kind(overlay, "NetworkPolicy") if selects(p["spec"]["podSelector"], found.labels)]
        assert any(set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} for p in guarding), found.component
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)
    for policy in of_kind(overlay, "NetworkPolicy"):
        chosen = [p for p in pods(overlay) if selects(policy["spec"]["podSelector"], p.labels)]
        for port in [port for rule in policy["spec"].get("ingress", []) for port in rule.get("ports", [])]:
            assert chosen and all(port["port"] in p.ports() for p in chosen)


def reaches(overlay: str, source: Pods, target: Pods, port: str | None) -> bool:
    """Whether the policies let `source` open `port` of `target` (None: every port): its egress and the other's ingress."""
    return allows(overlay, source, target, port, "egress", "to") and allows(
        overlay, target, source, port, "ingress", "from"
    )


def allows(overlay: str, subject: Pods, other: Pods, port: str | None, way: str, key: str) -> bool:
    number = None if port is None else (subject if way == "ingress" else other).ports()[port]
    rules = [
        rule
        for policy in of_kind(overlay, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], subject.labels)
        for rule in policy["spec"].get(way, [])
    ]
    return any(
        any(
            "namespaceSelector" not in peer and selects(peer["podSelector"], other.labels) for peer in rule.get(key, [])
        )
        and ("ports" not in rule or any(entry["port"] in (port, number) for entry in rule["ports"]))
        for rule in rules
    )


@each_overlay
def test_network_policies_allow_what_must_talk_and_nothing_else(overlay: str) -> None:
    router, prefill, decode = (one(overlay, name) for name in ("router", "prefill", "decode"))
    for worker in (one(overlay, name) for name in workers_of(overlay)):
        assert reaches(overlay, router, worker, "http")
        assert not reaches(overlay, worker, router, "http")
    assert reaches(overlay, decode, prefill, "bootstrap") and reaches(overlay, prefill, decode, "http")
    for name in workers_of(overlay):  # control plane and transfer engines, on any port
        assert reaches(overlay, prefill, one(overlay, name), None) and reaches(
            overlay, one(overlay, name), prefill, None
        )
    assert not reaches(overlay, router, prefill, "bootstrap")


@each_overlay
def test_probes_ask_for_what_is_served_without_a_key(overlay: str) -> None:
    for found in filter(lambda found: found.serves, pods(overlay)):
        probes = [
            found.container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        ]
        if found.component == "router":
            assert probes == ["/liveness", "/readiness", "/liveness"] and set(probes) <= set(PROBES)
            assert all(router_need_of("GET", path) is Access.NONE for path in probes)
        else:
            assert probes == ["/health", "/health", "/liveness"] and set(probes) <= WORKER_GETS
            assert all(worker_need_of(path) is Access.NONE for path in probes)


@each_overlay
def test_a_pod_has_time_to_drain(overlay: str) -> None:
    for found in pods(overlay):
        pause_s = int(found.container["lifecycle"]["preStop"]["exec"]["command"][1])
        if found.component == "router":
            config = router_config(overlay)
            needed_s = pause_s + config.drain_timeout_s + SHUTDOWN_TIMEOUT_S
        elif found.serves:
            needed_s = pause_s + worker_configs(overlay, found)[1].drain_timeout_s + 5
        else:  # it computes for as long as its leader drains, and ends with it
            needed_s = pause_s
            leader = one(overlay, found.role)
            leaders_pause_s = int(leader.container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert pause_s > leaders_pause_s + worker_configs(overlay, leader)[1].drain_timeout_s
        grace_s = found.spec["terminationGracePeriodSeconds"]
        assert needed_s < grace_s < needed_s + 60, (found.component, needed_s, grace_s)


@each_overlay
def test_an_old_worker_goes_only_when_routers_have_checked_the_new_one(overlay: str) -> None:
    config = router_config(overlay)
    checked_s = config.health_check_interval_s + config.health_check_timeout_s
    for deployment in of_kind(overlay, "Deployment"):
        if deployment["metadata"]["name"] != "tandem-router":
            assert deployment["spec"]["minReadySeconds"] > checked_s


@each_overlay
def test_a_model_may_take_its_time_to_load(overlay: str) -> None:
    for component in workers_of(overlay):
        probe = one(overlay, component).container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= (1800 if overlay in GPU else 600)


@each_overlay
def test_pods_are_what_the_restricted_standard_asks_for(overlay: str) -> None:
    for found in pods(overlay):
        assert found.spec["securityContext"]["runAsNonRoot"] and found.spec["securityContext"]["runAsUser"] == 10001
        assert found.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = found.container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
        rdma = overlay in GPU and found.component != "router"
        assert own["capabilities"] == {"drop": ["ALL"]}  # an added one would not reach a user who is not root
        assert not found.spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert found.spec["enableServiceLinks"] is False
        limits = found.container["resources"]["limits"]
        assert "memory" in limits and ("nvidia.com/gpu" in limits) == ("rdma/ib" in limits) == rdma
    (namespace,) = of_kind(overlay, "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "restricted"


@pytest.mark.parametrize("overlay", GPU)
def test_compiled_kernels_outlive_the_pod(overlay: str) -> None:
    for component in workers_of(overlay):
        found = one(overlay, component)
        path = environment(overlay, found)["TRITON_CACHE_DIR"]
        (mount,) = [mount for mount in found.container["volumeMounts"] if mount["mountPath"] == path]
        (volume,) = [volume for volume in found.spec["volumes"] if volume["name"] == mount["name"]]
        assert "persistentVolumeClaim" in volume and "readOnly" not in mount


@each_overlay
def test_gpus_without_rdma_between_pods_are_a_warning(overlay: str) -> None:
    documents = json.loads(json.dumps(load(overlay)))
    assert warnings_of(documents) == []
    text = json.dumps(documents).replace("rdma/ib", "example.com/other")
    said = warnings_of(json.loads(text))
    assert len(said) == (overlay in GPU) and all("UCX refuses cuda_ipc" in line for line in said)
    assert warnings_of(json.loads(text.replace('"enableServiceLinks"', '"hostPID": true, "enableServiceLinks"'))) == []


def test_no_key_stands_in_the_repository() -> None:
    assert (SOURCES / "base" / ".gitignore").read_text() == "/secrets/\n"
    for path in RENDERED.glob("*.yaml"):
        secrets = re.findall(r"^kind: Secret$", path.read_text(), re.MULTILINE)
        assert len(secrets) == 1
    assert {value for o in OVERLAYS for value in of_kind(o, "Secret")[0]["data"].values()} == {
        "YSBzYW1wbGUsIG5vIHNlY3JldAo="
    }


EXPORTED = {figure.name for figure in QUEUES.values()} | {"sglang:token_usage"}


def test_the_hpa_reads_metrics_that_the_adapter_s_rules_make_of_exported_ones() -> None:
    rules = yaml.safe_load(named("autoscaling", "ConfigMap", "tandem-adapter-rules")["data"]["config.yaml"])["rules"]
    made = {}
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0]
        assert series in EXPORTED and f"({series}{{" in rule["metricsQuery"]
        made[rule["name"]["as"]] = series
    scalers = of_kind("autoscaling", "HorizontalPodAutoscaler")
    assert {metric["pods"]["metric"]["name"] for s in scalers for metric in s["spec"]["metrics"]} == made.keys()
    assert_scaled("autoscaling", scalers)


def test_keda_asks_for_exported_metrics() -> None:
    scalers = of_kind("autoscaling-keda", "ScaledObject")
    for scaler in scalers:
        for trigger in scaler["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert set(re.findall(r"sglang:\w+", query)) <= EXPORTED and "sglang:" in query
            role = scaler["metadata"]["name"].removeprefix("tandem-")
            assert f'engine_type="{role}"' in query and 'namespace="tandem"' in query
    assert_scaled("autoscaling-keda", scalers)


def assert_scaled(overlay: str, scalers: list[Object]) -> None:
    """Both pools, and their Deployments leave the number alone."""
    assert sorted(s["spec"]["scaleTargetRef"]["name"] for s in scalers) == ["tandem-decode", "tandem-prefill"]
    for scaler in scalers:
        assert "replicas" not in named(overlay, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])["spec"]


@pytest.mark.parametrize("overlay", ["monitoring", "autoscaling", "autoscaling-keda"])
def test_prometheus_scrapes_every_service(overlay: str) -> None:
    (monitor,) = of_kind(overlay, "ServiceMonitor")
    services = [s for s in of_kind(overlay, "Service") if selects(monitor["spec"]["selector"], s["metadata"]["labels"])]
    assert len(services) == 3
    for endpoint in monitor["spec"]["endpoints"]:
        assert all(endpoint["port"] in [port["name"] for port in s["spec"]["ports"]] for s in services)
        assert endpoint["path"] in WORKER_GETS and worker_need_of(endpoint["path"]) is Access.NONE
    named(overlay, "ConfigMap", "tandem-dashboard")
    assert named(overlay, "PrometheusRule", "tandem")["spec"] == yaml.safe_load(RULES.read_text())
