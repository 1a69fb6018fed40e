"""Schemas, offline: Kubernetes' own from `kubernetes-validate` (strict: an unknown field is an error), and for the custom
resources that we use closed ones of our own, after the fields of their APIs' documentation.

Sources: lws.sigs.k8s.io (leaderworkerset.x-k8s.io/v1), prometheus-operator.dev (monitoring.coreos.com/v1), keda.sh (v1alpha1).
"""

import json
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

VERSIONS = ("1.31", "1.34", "1.37")

_TEXT = {"type": "string"}
_STRINGS = {"type": "object", "additionalProperties": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_INT_OR_PERCENT = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _some(items: dict[str, Any]) -> dict[str, Any]:
    """A list that is not empty."""
    return {"type": "array", "minItems": 1, "items": items}


def _like(pattern: str) -> dict[str, Any]:
    return {**_TEXT, "pattern": pattern}


_METADATA = _closed(["name", "namespace"], name=_TEXT, namespace=_TEXT, labels=_STRINGS, annotations=_STRINGS)
_ENDPOINT = _closed(
    ["port"],
    port=_TEXT,
    path=_like("^/"),
    interval=_like("^[0-9]+(ms|s|m)$"),
    scrapeTimeout=_TEXT,
    scheme={"enum": ["http", "https"]},
)
_ALERT = _closed(
    ["alert", "expr"],
    alert=_like("^[A-Z][A-Za-z]+$"),
    expr=_TEXT,
    labels=_STRINGS,
    annotations=_STRINGS,
    **{"for": _like("^[0-9]+(s|m|h)$")},
)
_TRIGGER = _closed(
    ["type", "metadata"],
    type={"enum": ["prometheus"]},
    metadata=_closed(
        ["serverAddress", "query", "threshold"], serverAddress=_TEXT, query=_TEXT, threshold=_like("^[0-9.]+$")
    ),
    metricType={"enum": ["AverageValue", "Value"]},
)
_SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _closed(
        ["leaderWorkerTemplate"],
        replicas=_COUNT,
        leaderWorkerTemplate=_closed(
            ["workerTemplate"],
            leaderTemplate={"type": "object"},  # a PodTemplateSpec: `pod_templates` hands it to the real schema
            workerTemplate={"type": "object"},
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        ),
        rolloutStrategy=_closed(
            ["type"],
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=_closed(
                [], partition=_COUNT, maxUnavailable=_INT_OR_PERCENT, maxSurge=_INT_OR_PERCENT
            ),
        ),
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_closed([], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _closed(
        ["selector", "endpoints"],
        selector=_closed([], matchLabels=_STRINGS),
        jobLabel=_TEXT,
        namespaceSelector=_closed([], any={"type": "boolean"}, matchNames={"type": "array"}),
        endpoints=_some(_ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ["groups"], groups=_some(_closed(["name", "rules"], name=_TEXT, rules=_some(_ALERT)))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _closed(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_closed(["name"], name=_TEXT, kind=_TEXT, apiVersion=_TEXT),
        **dict.fromkeys(("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"), _COUNT),
        advanced=_closed([], horizontalPodAutoscalerConfig=_closed([], name=_TEXT, behavior={"type": "object"})),
        triggers=_some(_TRIGGER),
    ),
}


def faults(document: dict[str, Any], version: str) -> list[str]:
    """What is wrong with one object, for Kubernetes `version`; custom resources are the same for all."""
    validator = _custom(document) or _core(document["apiVersion"], document["kind"], version)
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in validator.iter_errors(document)]


def _custom(document: dict[str, Any]) -> Draft202012Validator | None:
    spec = _SPECS.get((document["apiVersion"], document["kind"]))
    if spec is None:
        return None
    whole = _closed(["metadata", "spec"], apiVersion={}, kind={}, metadata=_METADATA, spec=spec)
    return Draft202012Validator(whole)


@cache
def _core(api_version: str, kind: str, version: str) -> Draft202012Validator:
    """Raises FileNotFoundError for an API that this version has not."""
    group, _, last = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0]}-{last}" if group else f"{kind.lower()}-{last}"
    return Draft202012Validator(_read(version, name), registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_read(version, "_definitions")) @ Registry()


def _read(version: str, name: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    (place,) = [f for f in folder.iterdir() if f.name.startswith(f"v{version}.") and f.name.endswith("-local-strict")]
    return json.loads((place / f"{name}.json").read_text())
