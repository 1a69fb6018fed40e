"""Scenario files: a run that once failed, with all its options written out, so that other draws of options do not change it."""

from dataclasses import asdict
from pathlib import Path

import msgspec

from tools.simulation.options import Options

FOLDER = Path(__file__).with_name("scenarios")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`found`: how; `what`: went wrong, in which code; `fix`: in one line."""

    found: str
    what: str
    fix: str
    options: Options


def load(path: Path) -> Scenario:
    return msgspec.json.decode(path.read_bytes(), type=Scenario)


def save(name: str, options: Options, *, found: str, what: str, fix: str) -> Path:
    path = FOLDER / f"{name}.json"
    body = {"found": found, "what": what, "fix": fix, "options": asdict(options)}
    FOLDER.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    return path


def all_paths() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))
