"""`make pins`: pip resolves what each image and each `make setup` installs, against the index, without installing it.

Writes docs/reports/pins.json, which a test holds against the files it was made from. A set that cannot be resolved leaves no
report. With metadata by ranges (fast-deps) a set costs some megabytes, not the gigabytes of its wheels.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench.environment import describe
from tools.image_pins import DOCKER, REPO, canonical, direct

REPORT = REPO / "docs" / "reports" / "pins.json"
OPTIONS = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "--no-cache-dir", "--use-feature=fast-deps", "-vv")
# A user's machine with a GPU: the index alone, whatever this machine prefers (its own torch for CPUs).
INDEX_ALONE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
ANSWER = re.compile(r'HTTP/1\.1" 20[06] (\d+)')


@dataclass(frozen=True, kw_only=True)
class PinSet:
    """`constraints`: a file of deploy/docker. `cuda`: torch comes from the index, with CUDA."""

    torch: str | None = None
    extras: tuple[str, ...]
    constraints: str | None = None
    cuda: bool = False

    def requirements(self) -> list[str]:
        lines = [str(requirement) for requirement in direct(self.extras)]
        return [*lines, self.torch] if self.torch else lines


SETS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, PinSet])


def digest() -> str:
    """Of what the sets are made from."""
    made_from = [
        (one, one.requirements(), one.constraints and (DOCKER / one.constraints).read_text()) for one in SETS.values()
    ]
    return hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]


def resolved(pip: str, wanted: PinSet, *, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what pip would install, and what it took to find out. Raises CalledProcessError."""
    constraints = ["--constraint", str(DOCKER / wanted.constraints)] if wanted.constraints else []
    index = ["--extra-index-url", env["TORCH_INDEX"]] if env.get("TORCH_INDEX") and not wanted.cuda else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [pip, "install", *OPTIONS, "--report", str(report), *index, *constraints, *wanted.requirements()]
        started_s = time.monotonic()
        done = subprocess.run(
            argv, env={**env, **(INDEX_ALONE if wanted.cuda else {})}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            done.check_returncode()
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "megabytes": round(sum(map(int, ANSWER.findall(done.stdout))) / 1e6, 1),
        "versions": dict(sorted((canonical(one["name"]), one["version"]) for one in found)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pins", description=__doc__)
    parser.add_argument("--pip", required=True, help="a pip of 25 or newer: an older one fetches whole wheels")
    args = parser.parse_args(argv)
    sets = {}
    for name, wanted in SETS.items():
        sets[name] = resolved(args.pip, wanted, env=os.environ)
        print(
            f"{name}: {len(sets[name]['versions'])} packages, {sets[name]['seconds']} s, {sets[name]['megabytes']} MB"
        )
    REPORT.write_text(
        json.dumps({"about": {**describe(), "command": "make pins"}, "digest": digest(), "sets": sets}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
