"""The files of the router's pages, open to all: what they show needs a key. Read once, at start."""

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from aiohttp import web

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Nothing from elsewhere, nothing inline, no frames: what a model, a worker or a client wrote can never become code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _files_of(package: str, path: str) -> dict[str, Path]:
    """Path to file, of all files of a page: `index.html` at `path` itself, the others below it."""
    folder = Path(str(resources.files(package)))
    files = sorted(file for file in folder.iterdir() if file.suffix in _TYPES)
    return {path if file.name == "index.html" else f"{path}/{file.name}": file for file in files}


FILES = (
    _files_of("router.web", "/web") | _files_of("router.dashboard", "/dashboard") | _files_of("router.chat", "/chat")
)


def _read_files() -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in FILES.items()}


@dataclass(eq=False)
class Pages:
    files: dict[str, bytes] = field(default_factory=_read_files)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(path, self.file) for path in self.files]

    async def file(self, request: web.BaseRequest) -> web.Response:
        kind = _TYPES[FILES[request.path].suffix]
        return web.Response(body=self.files[request.path], content_type=kind, charset="utf-8", headers=_HEADERS)
