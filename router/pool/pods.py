"""Which pods are workers, and what that changes in the worker table (router/pool/discovery.py). Pure.

    pod   absent --ready--> joined --deleted, ended, no longer selected--> leaving --its requests ended--> absent

Readiness only lets a pod in. From then on the router's own health checks count: they are faster, and they tell a worker that drains
from a dead one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from router.pool.worker import Role

MAX_PODS = 4096  # of one role
MAX_PROBLEMS = 64
_ENDED = ("Failed", "Succeeded")


class PodError(ValueError):
    """What the API server sent is no readable pod."""


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
    """The fields of a core/v1 Pod that are used; each may be missing."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod. `uid` distinguishes a new pod from an old one of the same name or address."""

    name: str  # NAMESPACE/NAME
    uid: str
    ip: str
    ready: bool
    ending: bool
    bootstrap_port: str | None = None  # the annotation


def read_pod(raw: object, *, annotation: str) -> Pod:
    """A pod from decoded JSON. `annotation`: that of its bootstrap port. Raises `PodError`."""
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
        bootstrap_port=(meta.annotations or {}).get(annotation),
    )


def read_version(raw: object) -> str:
    try:
        return msgspec.convert(raw, _PodObject).metadata.resourceVersion
    except msgspec.ValidationError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    url: str
    role: Role
    bootstrap_port: int | None
    pod: str
    uid: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Send it nothing new; remove it once its requests ended, and call `Reconciler.left`.

    `last_resort`: it is being deleted and serves for some seconds yet; the router may not have checked its successor.
    """

    url: str
    last_resort: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove it now: another pod has its address. Its requests go on, or fail by themselves."""

    url: str


Change = Wanted | Leave | Drop


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
        """Remove this pod, but no later one of the same name."""
        known = self._pods.get(pod.name)
        if known is not None and (not pod.uid or known.uid == pod.uid):
            del self._pods[pod.name]

    def __len__(self) -> int:
        return len(self._pods)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())


@dataclass(slots=True)
class _Known:
    wanted: Wanted
    leaving: bool = False
    last_resort: bool = False


@dataclass(slots=True)
class Reconciler:
    """Compares pods with the workers that came from them. `port`: of every pod's worker."""

    port: int
    problems: dict[str, str] = field(default_factory=dict)  # pod -> why it is no worker though it is ready
    _known: dict[str, _Known] = field(default_factory=dict)  # by URL

    def changes(self, pods: Mapping[Role, Sequence[Pod]]) -> list[Change]:
        """The changes after which the table has exactly the workers of `pods`. They count as done."""
        wanted = self._wanted(pods)
        ending = {(pod.name, pod.uid) for role in pods for pod in pods[role] if pod.ending}
        found: list[Change] = []
        for url, known in self._known.items():
            if url not in wanted:
                found += self._leave(known, ending=(known.wanted.pod, known.wanted.uid) in ending)
        for want in wanted.values():
            found += self._enter(want)
        return found

    def left(self, url: str) -> None:
        self._known.pop(url, None)

    @property
    def num_joined(self) -> int:
        return sum(not known.leaving for known in self._known.values())

    def _leave(self, known: _Known, *, ending: bool) -> list[Change]:
        """Once; a second time when a pod that was being deleted, a last resort, is gone."""
        if known.leaving and (ending or not known.last_resort):
            return []
        known.leaving, known.last_resort = True, ending
        return [Leave(known.wanted.url, ending)]

    def _enter(self, want: Wanted) -> list[Change]:
        known = self._known.get(want.url)
        if known is not None and not known.leaving and known.wanted == want:
            return []
        self._known[want.url] = _Known(want)
        return [want] if known is None else [Drop(want.url), want]

    def _wanted(self, pods: Mapping[Role, Sequence[Pod]]) -> dict[str, Wanted]:
        """By URL. Of two pods with one address the first counts; the other is a problem."""
        self.problems = {}
        found: dict[str, Wanted] = {}
        for role in sorted(pods):
            for pod in pods[role]:
                want = self._want(pod, role)
                other = found.get(want.url) if want is not None else None
                if want is not None and other is not None:
                    self._problem(pod, _shared(want, other))
                elif want is not None:
                    found[want.url] = want
        return found

    def _want(self, pod: Pod, role: Role) -> Wanted | None:
        """The worker of `pod`; None: it is not ready, or ends."""
        if pod.ending:
            return None
        if not pod.ip:
            if pod.ready:
                self._problem(pod, "it is ready, but has no status.podIP")
            return None
        url = f"http://[{pod.ip}]:{self.port}" if ":" in pod.ip else f"http://{pod.ip}:{self.port}"
        if not (pod.ready or self._is_in(url, pod)):
            return None
        text = pod.bootstrap_port if role is Role.PREFILL else None
        port = None if text is None else _port(text)
        if text is not None and port is None:
            self._problem(pod, f"its bootstrap port must be 1 to 65535, got {text[:40]!r}")
            return None
        return Wanted(url=url, role=role, bootstrap_port=port, pod=pod.name, uid=pod.uid)

    def _is_in(self, url: str, pod: Pod) -> bool:
        known = self._known.get(url)
        return known is not None and not known.leaving and known.wanted.uid == pod.uid

    def _problem(self, pod: Pod, why: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[pod.name] = why

    def check(self) -> None:
        assert all(known.wanted.url == url for url, known in self._known.items())


def _shared(want: Wanted, other: Wanted) -> str:
    if want.pod == other.pod:
        return f"both selectors choose it; it serves as {other.role}"
    return f"pod {other.pod} has its address {want.url}"


def _port(text: str) -> int | None:
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    return port if 0 < port < 65536 else None
