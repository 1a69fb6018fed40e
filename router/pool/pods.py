"""Pods of a Kubernetes API server. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_PODS = 16384  # per role
PORT_ANNOTATION = "sglang.ai/bootstrap-port"  # of a prefill pod, as in SGLang
_ENDED = ("Failed", "Succeeded")


class PodError(ValueError):
    """The API server sent an unreadable pod."""


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    deletionTimestamp: str | None = None
    annotations: dict[str, str] | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _Status(msgspec.Struct):
    phase: str | None = None
    podIP: str | None = None
    conditions: list[_Condition] | None = None


class _PodObject(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod. `uid` differs from earlier pods of its name or address."""

    name: str  # NAMESPACE/NAME
    uid: str
    ip: str
    ready: bool
    ending: bool
    bootstrap_port: str | None = None  # the annotation


def read_pod(raw: object) -> Pod:
    """Return a pod. Raises PodError."""
    try:
        pod = msgspec.convert(raw, _PodObject)
    except msgspec.ValidationError as err:
        raise PodError(f"not a pod: {err}") from None
    meta, status = pod.metadata, pod.status
    if not meta.name:
        raise PodError("not a pod: metadata.name is missing")
    return Pod(
        name=f"{meta.namespace}/{meta.name}",
        uid=meta.uid,
        ip=status.podIP or "",
        ready=any(c.type == "Ready" and c.status == "True" for c in status.conditions or ()),
        ending=meta.deletionTimestamp is not None or status.phase in _ENDED,
        bootstrap_port=(meta.annotations or {}).get(PORT_ANNOTATION),
    )


def read_version(raw: object) -> str:
    try:
        return msgspec.convert(raw, _PodObject).metadata.resourceVersion
    except msgspec.ValidationError:
        return ""


class PodSet:
    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self.num_refused = 0

    def replace(self, pods: Sequence[Pod]) -> None:
        self._pods = {}
        self.num_refused = 0
        for pod in pods:
            self.put(pod)

    def put(self, pod: Pod) -> None:
        if pod.name not in self._pods and len(self._pods) >= MAX_PODS:
            self.num_refused += 1
        else:
            self._pods[pod.name] = pod

    def remove(self, pod: Pod) -> None:
        """Remove this pod, but no later namesake."""
        known = self._pods.get(pod.name)
        if known is not None and (not pod.uid or known.uid == pod.uid):
            del self._pods[pod.name]

    def __len__(self) -> int:
        return len(self._pods)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())
