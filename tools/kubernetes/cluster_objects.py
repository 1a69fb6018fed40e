"""What the rendered manifests hold, in the shape that the tests ask for it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tools.kubernetes.render import RENDERED

Object = dict[str, Any]
EXAMPLE_IP = "10.1.2.3"
STORE = "store"  # the component of Mooncake's master
FOLLOWER = "-rank"  # how the component of pods ends that have ranks and serve no HTTP


@dataclass(frozen=True)
class Pods:
    """A template of pods and what makes them."""

    owner: Object
    template: Object

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def annotations(self) -> dict[str, str]:
        return self.template["metadata"].get("annotations") or {}

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def role(self) -> str:
        return self.component.removesuffix(FOLLOWER)

    @property
    def serves(self) -> bool:
        """Whether it serves HTTP."""
        return not self.component.endswith(FOLLOWER)

    @property
    def spec(self) -> Object:
        found: Object = self.template["spec"]
        return found

    @property
    def container(self) -> Object:
        """The only one."""
        (found,) = self.spec["containers"]
        return found

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


@cache
def load(overlay: str) -> list[Object]:
    text = (RENDERED / f"{overlay}.yaml").read_text()
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [found for found in load(overlay) if found["kind"] == kind]


def named(overlay: str, kind: str, name: str) -> Object:
    (found,) = [found for found in of_kind(overlay, kind) if found["metadata"]["name"] == name]
    return found


def pods(overlay: str) -> list[Pods]:
    """Tandem's own."""
    return [found for found in all_pods(overlay) if found.component != STORE]


def all_pods(overlay: str) -> list[Pods]:
    return [Pods(found, template) for found in load(overlay) for template in _templates(found)]


def _templates(found: Object) -> Iterator[Object]:
    if found["kind"] == "Deployment":
        yield found["spec"]["template"]
    if found["kind"] == "LeaderWorkerSet":
        yield found["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        yield found["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def one(overlay: str, component: str) -> Pods:
    (found,) = [p for p in pods(overlay) if p.component == component]
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A LabelSelector (matchLabels, matchExpressions with In), or a Service's plain map."""
    if not selector.keys() & {"matchLabels", "matchExpressions"} and selector:
        selector = {"matchLabels": selector}
    assert all(e["operator"] == "In" for e in selector.get("matchExpressions", []))
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", [])
    )


def environment(overlay: str, found: Pods) -> dict[str, str]:
    """As the kubelet would set it; the pod's own fields by examples. Fails on a reference that is not there."""
    values: dict[str, str] = {}
    for source in found.container.get("envFrom", []):
        values |= named(overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in found.container.get("env", []):
        values[entry["name"]] = {"status.podIP": EXAMPLE_IP, "metadata.namespace": "tandem"}[
            entry["valueFrom"]["fieldRef"]["fieldPath"]
        ]
    return values | _of_leader_worker_set(found)


def _of_leader_worker_set(found: Pods) -> dict[str, str]:
    """What it gives each container (kubernetes-sigs/lws, AddLWSVariables), by the example of the last pod of a group."""
    if found.owner["kind"] != "LeaderWorkerSet":
        return {}
    template, metadata = found.owner["spec"]["leaderWorkerTemplate"], found.owner["metadata"]
    is_leader = found.template is template["leaderTemplate"]
    return {
        "LWS_LEADER_ADDRESS": f"{metadata['name']}-0.{metadata['name']}.{metadata['namespace']}",
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": "0" if is_leader else str(template["size"] - 1),
    }


def command_line(overlay: str, found: Pods) -> list[str]:
    """The container's command with $(NAME) filled in; one that nothing defines stays, and is found by the caller."""
    words: list[str] = [*found.container["command"], *found.container["args"]]
    for name, value in environment(overlay, found).items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words
