"""GET /: an overview, as page or JSON."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from fastapi import Response

from service.flags import installed_version
from service.http.guard import CALLER
from service.http.request import HttpRequest
from service.http.routes import HttpRoute, get, json_response
from service.security.keys import Access

# ---- Static files of pages, public; their data needs a key.

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
    folder = Path(str(resources.files(package)))
    files = sorted(file for file in folder.iterdir() if file.suffix in _TYPES)
    return {path if file.name == "index.html" else f"{path}/{file.name}": file for file in files}


def _shared() -> dict[str, Path]:
    files = files_of("service.web", "/web")
    return {"/docs": files.pop("/web/docs.html"), "/favicon.ico": files["/web/icon.svg"], **files}


SHARED = _shared()  # on every server
CHAT = files_of("service.chat", "/chat")  # on servers that answer chats


def page_routes(files: Mapping[str, Path]) -> list[HttpRoute]:
    read = {path: (file.read_bytes(), _TYPES[file.suffix]) for path, file in files.items()}

    async def page(request: HttpRequest) -> Response:
        body, kind = read[request.path]
        return Response(content=body, media_type=kind, headers=PAGE_HEADERS)

    return [get(path, page) for path in read]


# ---- home

HOME = "/"
LINKS: Mapping[str, str] = {  # on every server
    "/docs": "every route and its fields",
    "/openapi.json": "the same for programs",
    "/v1/models": "the models that are served",
    "/health": "whether requests would be served",
    "/metrics": "figures for Prometheus",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>Tandem</title>
  <link rel="icon" href="/favicon.ico">
  <link rel="stylesheet" href="/web/base.css">
  <link rel="stylesheet" href="/web/plain.css">
</head>
<body>
  <header>
    <h1><img src="/web/icon.svg" alt="" width="26" height="26">Tandem</h1>
    <p id="summary">{server} {version}</p>
  </header>
  <main>
    <p class="facts" id="models">{models}</p>
    <ul class="links">
{links}
    </ul>
  </main>
</body>
</html>
"""


def home_route(server: str, *, models: Callable[[], Sequence[str]], links: Mapping[str, str]) -> HttpRoute:
    """The overview: models (for callers with a key), and links (path -> description)."""
    links = {**links, **LINKS}

    async def home(request: HttpRequest) -> Response:
        known = list(models()) if request[CALLER].access >= Access.USER else None
        if "text/html" in request.headers.get("Accept", ""):
            headers = {**PAGE_HEADERS, "Vary": "Accept"}
            return Response(content=_page(server, known, links), media_type="text/html", headers=headers)
        facts = {"name": "tandem", "server": server, "version": installed_version(), "links": links}
        return json_response(facts if known is None else {**facts, "models": known}, headers={"Vary": "Accept"})

    return get(HOME, home)


def _page(server: str, models: Sequence[str] | None, links: Mapping[str, str]) -> str:
    shown = "Model names need a key" if models is None else f"Serves {', '.join(models) or 'no model yet'}"
    rows = [f'      <li><a href="{path}"><code>{path}</code></a> {what}</li>' for path, what in links.items()]
    return _PAGE.format(
        server=escape(server), version=escape(installed_version()), models=escape(shown), links="\n".join(rows)
    )
