"""A Kubernetes API server as far as a pod watch needs one: real HTTP, list in pages, watch from a resource version.

It keeps a history of events; `compact` forgets it, after which an old version is answered 410, as etcd's compaction does.
A pod whose labels no longer match is told as DELETED to that selector's watches, as a real server tells it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "service-account-token"
NAMESPACE = "tandem"
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


@dataclass(frozen=True)
class _Stream:
    selector: str
    request: web.Request
    response: web.StreamResponse
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class KubeServer:
    """`pods` by name; `lists` and `watches`: the queries that came; `refuse`: a status instead of an answer."""

    port: int = 0
    version: int = 100
    oldest: int = 0  # a watch from before this is answered 410
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[tuple[int, str, dict[str, Any], dict[str, Any] | None]] = field(default_factory=list)
    lists: list[dict[str, str]] = field(default_factory=list)
    watches: list[dict[str, str]] = field(default_factory=list)
    refuse: int | None = None
    page: int = 2
    _streams: dict[int, "_Stream"] = field(default_factory=dict)

    @property
    def num_watching(self) -> int:
        return len(self._streams)

    async def put(self, pod: dict[str, Any]) -> None:
        """Create or change a pod."""
        name = pod["metadata"]["name"]
        before = self.pods.get(name)
        pod = self._stamped(pod)
        self.pods[name] = pod
        await self._note("ADDED" if before is None else "MODIFIED", pod, before)

    async def delete(self, name: str) -> None:
        await self._note("DELETED", self._stamped(self.pods.pop(name)), None)

    async def say(self, line: bytes) -> None:
        """The same bytes on every open watch."""
        for stream in list(self._streams.values()):
            await stream.response.write(line)

    async def bookmark(self) -> None:
        self.version += 1
        mark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}}
        await self.say(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")

    def end_watches(self) -> None:
        """As after `timeoutSeconds`."""
        for stream in list(self._streams.values()):
            stream.ended.set()

    def cut(self) -> None:
        """Every watch's connection breaks, in the middle of whatever it says."""
        for stream in list(self._streams.values()):
            if stream.request.transport is not None:
                stream.request.transport.abort()
        self._streams.clear()

    def compact(self) -> None:
        self.oldest = self.version
        self.history.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        query = dict(request.query)
        if query.get("watch") == "true":
            self.watches.append(query)
        else:
            self.lists.append(query)
        if self.refuse is not None:
            return _status(self.refuse, "told to refuse")
        return await self._watch(request, query) if query.get("watch") == "true" else self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        """`limit` is capped at `page`, so that a test sees pages."""
        found = [pod for pod in self.pods.values() if _matches(pod, query["labelSelector"])]
        start = int(query.get("continue", 0))
        end = start + min(int(query["limit"]), self.page)
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(found) else {})
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": found[start:end]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        since, selector = int(query["resourceVersion"]), query["labelSelector"]
        if since < self.oldest:
            return await self._expired(request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for version, kind, pod, before in list(self.history):
            if version > since:
                await response.write(_line(kind, pod, before, selector))
        stream = self._streams[id(response)] = _Stream(selector, request, response)
        try:
            await stream.ended.wait()
        finally:
            self._streams.pop(id(response), None)
        return response

    async def _expired(self, request: web.Request) -> web.StreamResponse:
        """As a watch cache says it: 200, then an ERROR event."""
        stream = web.StreamResponse()
        await stream.prepare(request)
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        await stream.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        return stream

    def _stamped(self, pod: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        pod = deepcopy(pod)
        pod["metadata"]["resourceVersion"] = str(self.version)
        return pod

    async def _note(self, kind: str, pod: dict[str, Any], before: dict[str, Any] | None) -> None:
        self.history.append((self.version, kind, pod, before))
        for stream in list(self._streams.values()):
            await stream.response.write(_line(kind, pod, before, stream.selector))


@asynccontextmanager
async def kube_server(kubeconfig: Path) -> AsyncIterator[KubeServer]:
    """A listening server; `kubeconfig` is written so that the official client finds it and shows its token."""
    server = KubeServer()
    app = web.Application()
    app.router.add_get(PATH, server.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    kubeconfig.write_text(json.dumps(_kubeconfig(server.port)))
    try:
        yield server
    finally:
        server.end_watches()
        await runner.cleanup()


def pod(name: str, ip: str | None = None, *, labels: dict[str, str], ready: bool = True, **more: Any) -> dict[str, Any]:
    """A pod as the API server would say it; `more`: fields of its metadata."""
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": labels, **more},
        "spec": {"containers": [{"name": "worker"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        },
    }


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
    }


def _line(kind: str, pod: dict[str, Any], before: dict[str, Any] | None, selector: str) -> bytes:
    """What one watch is told of a change; nothing if it is none of its pods'."""
    now, then = _matches(pod, selector), before is not None and _matches(before, selector)
    if kind == "MODIFIED" and now != then:
        kind = "ADDED" if now else "DELETED"
    elif not now:
        return b""
    return json.dumps({"type": kind, "object": pod}).encode() + b"\n"


def _matches(pod: dict[str, Any], selector: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in (part.split("=", 1) for part in selector.split(",")))


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
