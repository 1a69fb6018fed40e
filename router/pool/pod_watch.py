"""Watch of one label selector's pods at a Kubernetes API server: list, then watch, repeatedly.

Protocol: kubernetes.io/docs/reference/using-api/api-concepts. `kubernetes.aio` only connects: its
models refuse incomplete pods.
"""

import asyncio
import importlib
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from router.pool.worker import Role
from service.extras import missing
from service.flags import ConfigError
from service.waiter import loop_time_s

# ---- Pods of a Kubernetes API server. Pure.

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
    continue_: str = msgspec.field(name="continue", default="")  # of a list's page
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
    """`uid` differs from earlier pods of its name or address."""

    name: str  # NAMESPACE/NAME
    uid: str
    ip: str
    ready: bool
    ending: bool
    bootstrap_port: str | None = None  # the annotation


def read_pod(raw: object) -> Pod:
    """Raises PodError."""
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
        """Keep a later namesake."""
        known = self._pods.get(pod.name)
        if known is not None and (not pod.uid or known.uid == pod.uid):
            del self._pods[pod.name]

    def __len__(self) -> int:
        return len(self._pods)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())


# ---- pod watch

log = logging.getLogger(__name__)

PAGE_SIZE = 500
WATCH_S = 120  # the server ends a watch then, so dead connections are noticed
TIMEOUT_S = 15.0  # until a response starts
MAX_LINE_BYTES = 4 << 20  # the largest object in etcd is 1.5 MiB
MAX_PAGE_BYTES = 64 << 20
SHORT_S = 1.0  # a watch that ends sooner counts as failed
BASE_BACKOFF_S, MAX_BACKOFF_S = 0.25, 30.0  # between attempts
GONE = 410


class KubernetesError(Exception):
    """`relist`: the version is unusable."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.relist = status in (0, GONE)


class _Event(msgspec.Struct):
    type: str = ""
    object: Any = None


class _Page(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    items: list[Any] | None = None


class _WatchStatus(msgspec.Struct):
    code: int = 0
    message: str = ""


class KubeApi:
    def __init__(self, library: Any, configuration: Any, *, namespace: str | None) -> None:
        self._client = library.ApiClient(configuration)
        self._core = library.CoreV1Api(self._client)
        self._namespace = namespace

    async def pods(self, *, timeout_s: float, **parameters: Any) -> aiohttp.ClientResponse:
        """The caller closes the response."""
        parameters |= {"_request_timeout": timeout_s}
        if self._namespace is None:
            call = self._core.list_pod_for_all_namespaces_without_preload_content(**parameters)
        else:
            call = self._core.list_namespaced_pod_without_preload_content(self._namespace, **parameters)
        response: aiohttp.ClientResponse = await call
        return response

    async def close(self) -> None:
        await self._client.close()


async def connect(*, namespace: str | None) -> KubeApi:
    """Connect by service account, $KUBECONFIG or ~/.kube/config. Raises ConfigError."""
    try:
        client: Any = importlib.import_module("kubernetes.aio.client")
        config: Any = importlib.import_module("kubernetes.aio.config")
    except ImportError as err:
        raise ConfigError(f"--service-discovery: {missing([err.name or 'kubernetes'], 'k8s')}") from None
    configuration = client.Configuration()
    path = Path(os.environ.get("KUBECONFIG") or "~/.kube/config").expanduser()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=str(path), client_configuration=configuration, persist_config=False
            )
    except (config.ConfigException, OSError, ValueError, TypeError) as err:
        raise ConfigError(
            f"--service-discovery: no API server: not in a pod with a service account, and {path}: {err}"
        ) from None
    return KubeApi(client, configuration, namespace=namespace)


@dataclass(eq=False, kw_only=True)
class PodWatch:
    """Pods of one role. Cancel `run` to end it."""

    api: KubeApi
    role: Role
    selector: str
    on_change: Callable[[], None]
    pods: PodSet = field(default_factory=PodSet)
    listed: bool = False
    _error: str = "not connected yet"
    _version: str = ""  # the last one seen; empty if none or expired

    def status(self) -> dict[str, Any]:
        return {"synced": self.listed and not self._error, "pods": len(self.pods), "error": self._error or None}

    async def run(self) -> None:
        num_failed = 0
        while True:
            began_s = loop_time_s()
            error = await self._once()
            lasted = loop_time_s() - began_s >= SHORT_S
            if lasted:
                num_failed = 0
            if error:
                self._on_state(error)
            if error or not lasted:
                await asyncio.sleep(backoff_s(num_failed, random.random()))
                num_failed += 1

    async def _once(self) -> str:
        try:
            if not self._version:
                await self._list()
            await self._watch()
        except KubernetesError as err:
            if err.relist:
                self._version = ""
            return str(err)
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            return f"{type(err).__name__}: {err}"
        return ""

    async def _list(self) -> None:
        pods: list[Any] = []
        page = _Page()
        while True:
            page = await self._page(page.metadata.continue_)
            pods += page.items or []
            if not page.metadata.continue_ or len(pods) > MAX_PODS:
                break
        if not page.metadata.resourceVersion:
            raise KubernetesError("a list without metadata.resourceVersion")
        self._version = page.metadata.resourceVersion
        self.pods.replace([pod for pod in map(self._read, pods) if pod is not None])
        self.listed = True
        self.on_change()

    async def _page(self, token: str) -> _Page:
        more = {"_continue": token} if token else {}
        response = await self.api.pods(label_selector=self.selector, limit=PAGE_SIZE, timeout_s=TIMEOUT_S, **more)
        async with response:
            await _check(response)
            body = b"".join([part async for part in _bounded(response, MAX_PAGE_BYTES)])
        return _decoded(body, _Page)

    async def _watch(self) -> None:
        response = await self.api.pods(
            label_selector=self.selector,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            watch=True,
            timeout_s=WATCH_S + TIMEOUT_S,
        )
        async with response:
            await _check(response)
            self._on_state("")
            async for line in _lines(response):
                self._on_line(line)

    def _on_line(self, line: bytes) -> None:
        event = _decoded(line, _Event)
        if event.type == "ERROR":
            status = _decoded(msgspec.json.encode(event.object), _WatchStatus)
            raise KubernetesError(f"the watch ended: {status.code} {status.message[:300]}", status=status.code)
        self._version = read_version(event.object) or self._version
        if event.type in ("ADDED", "MODIFIED", "DELETED") and (pod := self._read(event.object)) is not None:
            if event.type == "DELETED":
                self.pods.remove(pod)
            else:
                self.pods.put(pod)
            self.on_change()

    def _read(self, raw: object) -> Pod | None:
        try:
            return read_pod(raw)
        except PodError as err:
            log.warning("service discovery: %s", err)
            return None

    def _on_state(self, error: str) -> None:
        if error and error != self._error:
            log.warning("service discovery: %s pods are not followed: %s", self.role, error)
        elif self._error and not error:
            log.info("service discovery: follows %s pods", self.role)
        self._error = error


def backoff_s(num_failed: int, draw: float) -> float:
    """None at first, then exponential with jitter (`draw` in [0, 1))."""
    if num_failed == 0:
        return 0.0
    return min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(num_failed - 1, 30)) * (0.5 + draw / 2)


Decoded = TypeVar("Decoded")


def _decoded(text: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as err:
        raise KubernetesError(f"the API server's answer cannot be read: {err}") from None


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = b"".join([part async for part in _bounded(response, 1 << 20)])
    try:
        message = _decoded(body, _WatchStatus).message
    except KubernetesError:
        message = ""
    hint = "; the router's service account needs get, list and watch of pods" if response.status in (401, 403) else ""
    raise KubernetesError(f"the API server answers {response.status} {message[:300]}{hint}", status=response.status)


async def _bounded(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            raise KubernetesError(f"an answer of more than {most} bytes")
        yield part


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for part in response.content.iter_any():
        rest += part
        *lines, tail = rest.split(b"\n")
        if len(tail) > MAX_LINE_BYTES:
            raise KubernetesError(f"an event of more than {MAX_LINE_BYTES} bytes")
        rest = bytearray(tail)
        for line in lines:
            if line.strip():
                yield bytes(line)
