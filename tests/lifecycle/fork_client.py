"""A process that forks a child and stays: python -m tests.lifecycle.fork_client ARGS-OF-THE-CHILD..."""

import os
import signal
import sys

from service.process.child_process import forked, server_in

if __name__ == "__main__":
    child = forked(server_in(os.environ) or "", "tests.lifecycle.forked_part", sys.argv[1:], env=os.environ)
    assert child is not None
    signal.pause()
