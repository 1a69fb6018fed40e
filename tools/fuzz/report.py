"""The report of `make fuzz`: its parts, as each ends, in a JSON file and a page.

A part that was cut off, has failed, or has not run, is in the page as such.
"""

import json
import time
from pathlib import Path
from typing import Any

from deploy.bench.environment import describe

DONE, FAILED, CUT = "done", "FAILED", "cut off"
PAGE = Path(__file__).with_suffix(".md").read_text()


class Report:
    """Results by part. `path`: of the page; the JSON file lies beside it, whose other parts stay unless `anew`."""

    def __init__(self, path: Path | None, names: tuple[str, ...], *, anew: bool = False) -> None:
        self._path = path
        self._names = names
        self._parts: dict[str, dict[str, Any]] = {}
        self._about = describe()
        if not anew and path is not None and path.with_suffix(".json").exists():
            kept = json.loads(path.with_suffix(".json").read_text())
            self._parts = {name: part for name, part in kept["parts"].items() if name in names}

    def keep(self, name: str, *, status: str, inputs: int, seconds: float, result: str) -> None:
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        about = {"commit": self._about["commit"], "ended": ended, "status": status}
        self._parts[name] = {**about, "inputs": inputs, "seconds": round(seconds, 1), "result": result}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"about": self._about, "parts": self._parts}
            self._path.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
            self._path.write_text(self.text())

    def text(self) -> str:
        return PAGE.format(
            verdict=self._verdict(),
            rows="\n".join(map(self._row, self._names)),
            about=self._about,
            commits=", ".join(sorted({part["commit"] or "?" for part in self._parts.values()})),
            versions=", ".join(f"{name} {version}" for name, version in self._about["versions"].items()),
        )

    def _row(self, name: str) -> str:
        part = self._parts.get(name)
        if part is None:
            return f"| {name} | | | | not run | |"
        rate = part["inputs"] / max(part["seconds"], 0.1)
        ended = part["status"] if part["status"] != DONE else part["ended"]
        return f"| {name} | {part['inputs']:,} | {part['seconds']:.0f} | {rate:,.0f} | {ended} | {part['result']} |"

    def _verdict(self) -> str:
        inputs = sum(part["inputs"] for part in self._parts.values())
        bad = [name for name in self._names if self._parts.get(name, {}).get("status") != DONE]
        if not bad:
            return f"**{inputs:,} inputs; none crashed, hung or leaked, and each was answered as described.**"
        return f"**Not complete: {', '.join(bad)}.** {inputs:,} inputs so far."
