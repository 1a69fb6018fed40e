"""What the tests of the fork server fork: imported once in the server, `main` in each child."""

import json
import os
import signal
import sys
import time
from pathlib import Path

IMPORTED_IN = os.getpid()

if "TANDEM_TEST_GATE" in os.environ:
    while not Path(os.environ["TANDEM_TEST_GATE"]).exists():  # the server still imports
        time.sleep(0.005)


def main(argv: list[str]) -> int:
    what, *rest = argv
    if what == "tell":
        os.write(int(rest[0]), json.dumps(_facts()).encode())
        print("told")
    elif what == "exit":
        sys.exit(int(rest[0]))
    elif what == "raise":
        raise RuntimeError("broken")
    elif what == "touch":
        Path(rest[0]).touch()
    elif what == "wait":
        Path(rest[0]).write_text(str(os.getpid()))
        signal.pause()
    return 0


def _facts() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "imported_in": IMPORTED_IN,
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        "argv": sys.argv,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "descriptors": sorted(
            int(name) for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()
        ),
    }
