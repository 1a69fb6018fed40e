"""Debian's Chromium without a window, driven over its DevTools protocol: a page as a person would meet it.

Each `Page` remembers what it asked for and what it complained of. Nothing but aiohttp is needed.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp

AXE = (resources.files("axe_core_python") / "axe.min.js").read_text()
CHROMIUM = "/usr/bin/chromium"  # `make test` installs it
DEADLINE_S = 60.0
_ARGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}

# Pages that poll do it ten times as often: a test need not wait for a second to pass.
_HURRY = "{ const later = setTimeout; globalThis.setTimeout = (act, ms, ...rest) => later(act, ms / 10, ...rest); }"


class Page:
    """One tab. `asked`: every URL it requested; `complaints`: console errors, exceptions, what the policy blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            return await self._answers[number]

    async def js(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for. `AssertionError` when it throws."""
        said = await self._evaluate(expression)
        assert "error" not in said, (expression, said["error"])
        assert "exceptionDetails" not in said, (expression, said["exceptionDetails"])
        return said["result"].get("value")

    async def _evaluate(self, expression: str) -> dict[str, Any]:
        return await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)

    async def until(self, expression: str) -> Any:
        """The first true value of the expression. A question that meets a page on its way to another has no answer: it is asked again."""
        value = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not value:
                    said = await self._evaluate(expression)
                    assert "exceptionDetails" not in said, (expression, said["exceptionDetails"])
                    value = None if "error" in said else said["result"].get("value")
                    if not value:
                        await asyncio.sleep(0.03)
        except TimeoutError:
            seen = await self.js("document.body.innerText")
            raise AssertionError(f"never true: {expression}; complaints {self.complaints}; the page: {seen}") from None
        return value

    async def open(self, url: str) -> None:
        """Go there; the document and its scripts are loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def too_wide(self, *, but: str) -> list[str]:
        """What reaches beyond a window of a phone or larger, except in elements `but`; nothing may scroll it wider."""
        beyond = f"n.getBoundingClientRect().right > innerWidth + 1 && !n.closest('{but}')"
        nodes = f"[...document.querySelectorAll('*')].filter((n) => {beyond})"
        found: list[str] = []
        for width in (320, 390, 800):
            await self.resize(width, 800, phone=width < 700)
            assert await self.js("Math.max(document.documentElement.scrollWidth, innerWidth)") == width
            found += await self.js(f"{nodes}.map((n) => n.className || n.tagName)")
        return found

    async def violations(self) -> list[Any]:
        """What axe finds on the light and on the dark page, with the nodes; the page has run `AXE`."""
        found = "found.violations.map((rule) => [rule.id, rule.nodes.map((node) => node.html + node.failureSummary)])"
        ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        violations = []
        for scheme in ("light", "dark"):
            await self.prefer(prefers_color_scheme=scheme)
            assert (sum(await self.js(ground)) > 700) == (scheme == "light")
            violations += await self.js(f"axe.run().then((found) => {found})")
        return violations

    async def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=wanted)

    async def type(self, text: str) -> None:
        """Text at the caret of what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key of `KEYS`, on what has the focus."""
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._answers.pop(said["id"])
                if not future.done():
                    future.set_result(said.get("result") or {"error": said.get("error")})
            else:
                self._on_event(said["method"], said["params"])

    def _on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Page]:
    """A new tab of the browser whose DevTools are at `address`."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{address}/json/new?about:blank") as response:
            made = await response.json()
        page = Page(await session.ws_connect(made["webSocketDebuggerUrl"], max_msg_size=1 << 28))
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.call(f"{domain}.enable")
            await page.call("Page.addScriptToEvaluateOnNewDocument", source=_HURRY)
            yield page
        finally:
            await page.close()
            async with session.get(f"http://{address}/json/close/{made['id']}"):
                pass


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """Where the DevTools of a browser listen that has an empty profile in `folder`; no process of it is left."""
    assert Path(CHROMIUM).exists(), f"{CHROMIUM} is missing; run: bash deploy/system_packages.sh tests"
    profile = folder / "profile"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *_ARGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield f"127.0.0.1:{_devtools_port(profile / 'DevToolsActivePort', process)}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _devtools_port(file: Path, process: "subprocess.Popen[bytes]") -> int:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, f"chromium ended with status {process.returncode}"
        assert time.monotonic() < deadline_s, f"no {file}"
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return int(lines[0])
        time.sleep(0.02)
