"""GET /: an overview, as page or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from aiohttp import web

from service.http.guard import CALLER
from service.http.pages import PAGE_HEADERS
from service.http.stream import json_response
from service.security.keys import Access
from service.version import installed_version

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


@dataclass(frozen=True, kw_only=True)
class Home:
    """The overview: models (for callers with a key), and links (path -> description)."""

    server: str
    models: Callable[[], Sequence[str]]
    links: Mapping[str, str]

    def routes(self) -> list[web.RouteDef]:
        return [web.get(HOME, self.home)]

    async def home(self, request: web.BaseRequest) -> web.Response:
        models = list(self.models()) if request[CALLER].access >= Access.USER else None
        links = {**self.links, **LINKS}
        if "text/html" in request.headers.get("Accept", ""):
            body = self._page(models, links)
            headers = {**PAGE_HEADERS, "Vary": "Accept"}
            return web.Response(text=body, content_type="text/html", charset="utf-8", headers=headers)
        facts = {"name": "tandem", "server": self.server, "version": installed_version(), "links": links}
        return json_response(facts if models is None else {**facts, "models": models}, headers={"Vary": "Accept"})

    def _page(self, models: Sequence[str] | None, links: Mapping[str, str]) -> str:
        shown = "Model names need a key" if models is None else f"Serves {', '.join(models) or 'no model yet'}"
        rows = [f'      <li><a href="{path}"><code>{path}</code></a> {what}</li>' for path, what in links.items()]
        return _PAGE.format(
            server=escape(self.server), version=escape(installed_version()), models=escape(shown), links="\n".join(rows)
        )
