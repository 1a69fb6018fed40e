"""README's commands on a bare Debian root. Short: `make run` and `make chat` answer and all that tests need is there; long: the suite.

Status 0: README holds; 1: it does not; 3: this machine cannot make a bare root (the message says why).
"""

import argparse
import datetime
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deploy.bench.environment import describe
from tools.fresh.bare_root import CLONE, NAMESPACES, TREE, CannotCheckError, bare_root

CANNOT = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tools.fresh", description=__doc__)
    parser.add_argument("--long", action="store_true", help="run the whole suite in it")
    parser.add_argument("--report", type=Path, help="write what was seen as JSON")
    args = parser.parse_args()
    begun = time.monotonic()
    try:
        with bare_root() as root:
            made_s = round(time.monotonic() - begun, 1)
            commit = _commit(root / CLONE)
            print(f"fresh-check: a bare root is made, {made_s:.0f} s; it has commit {commit}", flush=True)
            seen = _enter(root, long=args.long)
    except CannotCheckError as e:
        print(f"fresh-check: cannot run here: {e}", flush=True)
        return CANNOT
    if seen is None:
        return 1
    if args.report:
        args.report.write_text(json.dumps(_report(seen, commit=commit, made_s=made_s, long=args.long), indent=1) + "\n")
    print(f"fresh-check: README holds on a bare root ({time.monotonic() - begun:.0f} s); {seen['pytest']}", flush=True)
    return 0


def _enter(root: Path, *, long: bool) -> dict[str, object] | None:
    """What the check inside saw; None: it failed, and said so."""
    with tempfile.NamedTemporaryFile(prefix="tandem-fresh-", suffix=".json") as file:
        # The shell is process 1 of the namespace and reaps what its children leave.
        script = f'"{sys.executable}" -m tools.fresh.inside "$@"; exit $?'
        command = [*NAMESPACES, "/bin/bash", "-c", script, "bash", str(root), str(int(long)), file.name]
        child = subprocess.Popen(command, cwd=TREE)
        try:
            status = child.wait()
        finally:
            child.kill()
            child.wait()
        return json.loads(Path(file.name).read_text()) if status == 0 else None


def _report(seen: dict[str, object], *, commit: str, made_s: float, long: bool) -> dict[str, object]:
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "form": "long" if long else "short",
        "hardware": {name: describe()[name] for name in ("cpu", "cores", "memory_gib")},
        "kernel": platform.release(),
        "mmdebstrap_s": made_s,
        **seen,
    }


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nfresh-check: stopped; the root is removed", flush=True)
        sys.exit(130)
