"""Static files of pages, public; their data needs a key."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from aiohttp import web

# Nothing external or inline, no frames: text from models, workers or clients never becomes code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def files_of(package: str, path: str) -> dict[str, Path]:
    """Return path -> file, with `index.html` at `path`."""
    folder = Path(str(resources.files(package)))
    files = sorted(file for file in folder.iterdir() if file.suffix in _TYPES)
    return {path if file.name == "index.html" else f"{path}/{file.name}": file for file in files}


def _shared() -> dict[str, Path]:
    files = files_of("service.web", "/web")
    return {"/docs": files.pop("/web/docs.html"), "/favicon.ico": files["/web/icon.svg"], **files}


SHARED = _shared()  # on every server
CHAT = files_of("service.chat", "/chat")  # on servers that answer chats


class Pages:
    def __init__(self, files: Mapping[str, Path] = SHARED) -> None:
        self._files = {path: (file.read_bytes(), _TYPES[file.suffix]) for path, file in files.items()}

    def routes(self) -> list[web.RouteDef]:
        return [web.get(path, self.file) for path in self._files]

    async def file(self, request: web.BaseRequest) -> web.Response:
        body, kind = self._files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)
