"""A stand-in for a worker or router: run as a script, it behaves as its arguments say.

usage: scripted.py PORT [--die-at-start LINE] [--ignore-drain] [--note-drain FILE] [--grandchild PIDFILE] [--never-healthy]
       [--starts-once FILE] [--drains]

SIGUSR1 is what `tandem up` sends to drain it (service/process/stop_signals.py).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    healthy = True

    def do_GET(self) -> None:
        body = json.dumps({"max_total_num_tokens": 4096, "served_model_name": "scripted", "pid": os.getpid()}).encode()
        self.send_response(200 if self.healthy else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-at-start")
    parser.add_argument("--ignore-drain", action="store_true")
    parser.add_argument("--note-drain")
    parser.add_argument("--grandchild")
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--starts-once")
    parser.add_argument("--drains", action="store_true")
    args = parser.parse_args()
    if args.starts_once and Path(args.starts_once).exists():
        sys.exit("OSError: it starts once only")
    if args.starts_once:
        Path(args.starts_once).touch()
    if args.ignore_drain:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if args.note_drain:
        signal.signal(signal.SIGUSR1, lambda signum, frame: Path(args.note_drain).touch())
    if args.drains:
        signal.signal(signal.SIGUSR1, lambda signum, frame: os._exit(0))
    if args.grandchild:
        sleeper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        Path(args.grandchild).write_text(str(sleeper.pid))
    if args.die_at_start:
        print("loading 40%", args.die_at_start, "bye", sep="\n", flush=True)
        sys.exit(3)
    Handler.healthy = not args.never_healthy
    server = HTTPServer(("127.0.0.1", args.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
