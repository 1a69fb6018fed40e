"""A stand-in of the Hugging Face hub: the endpoints that `huggingface_hub` uses, over a folder of models.

folder/ORGANIZATION/NAME/REVISION/files. It counts what is asked, may want a token for a model, and may cut downloads.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

TOKEN = "hf_good"
CUT_AFTER = 1000  # bytes


@dataclass
class Hub:
    folder: Path
    url: str = ""
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)  # paths of files
    downloads: Counter[str] = field(default_factory=Counter)

    async def info(self, request: web.Request) -> web.Response:
        model = self._model(request)
        revision = request.match_info.get("revision", "main")
        folder = self.folder / model
        if not folder.is_dir():
            return _refusal(404, "RepoNotFound", "Repository not found")
        for path in folder.iterdir():
            if revision in (path.name, _commit(path)):
                names = [{"rfilename": name} for name in _files(path)]
                return web.json_response({"id": model, "modelId": model, "sha": _commit(path), "siblings": names})
        return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    async def tree(self, request: web.Request) -> web.Response:
        files = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file.read_bytes())}
            for name, file in _files(self._at(request)).items()
        ]
        return web.json_response(files)

    async def file(self, request: web.Request) -> web.StreamResponse:
        model, folder, name = self._model(request), self._at(request), request.match_info["path"]
        file = folder / name
        if model in self.gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _refusal(403, "GatedRepo", "Access to this model is restricted")
        if not file.is_file():
            return _refusal(404, "EntryNotFound", "Entry not found")
        data = file.read_bytes()
        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": _commit(folder), "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(data))})
        start = 0
        if wanted := request.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.downloads[name] += 1
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(data) - start
        await response.prepare(request)
        if name in self.cut:
            await response.write(data[start : start + CUT_AFTER])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data[start:])
        return response

    def _model(self, request: web.Request) -> str:
        return f"{request.match_info['organization']}/{request.match_info['name']}"

    def _at(self, request: web.Request) -> Path:
        revision = request.match_info["revision"]
        found = [p for p in (self.folder / self._model(request)).iterdir() if revision in (p.name, _commit(p))]
        return found[0]


@contextmanager
def hub_stand_in(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    started, ready = asyncio.new_event_loop(), threading.Event()

    async def serve() -> web.AppRunner:
        app = web.Application()
        model = "{organization}/{name}"
        for path, handler in (
            (f"/api/models/{model}", hub.info),
            (f"/api/models/{model}/revision/{{revision}}", hub.info),
            (f"/api/models/{model}/tree/{{revision}}", hub.tree),
            (f"/{model}/resolve/{{revision}}/{{path:.+}}", hub.file),
        ):
            app.router.add_get(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = started.run_until_complete(serve())
        ready.set()
        started.run_forever()
        started.run_until_complete(runner.cleanup())
        started.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        started.call_soon_threadsafe(started.stop)
        thread.join(30)


def _files(folder: Path) -> dict[str, Path]:
    """All files of a revision by their paths in it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _commit(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode(), usedforsecurity=False).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _refusal(status: int, code: str, message: str) -> web.Response:
    return web.json_response(
        {"error": message}, status=status, headers={"X-Error-Code": code, "X-Error-Message": message}
    )
