"""The cluster of the fault matrix with two ranks a worker, each of which can be killed or stopped alone."""

import contextlib

import httpx2 as httpx
import psutil

from tools.faults.rig import WORKERS, Rig

WATCHDOG_S = 6.0
# A KV head a unit: the four shapes of a pair move each page in pieces, from and to every rank.
RANKS = ("--model-path", "recall-wide", "--tp-size", "2", "--kv-units", "4", "--disaggregation-kv-checksum")
LIMITS = ("--watchdog-timeout", str(WATCHDOG_S), "--dist-timeout", "60")
LEADER, FOLLOWER = "leader", "follower"
MODULES = {LEADER: "disagg.scheduler_process", FOLLOWER: "disagg.rank_process"}


class RankRig(Rig):
    switched = WORKERS

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        return [*command, *RANKS, *LIMITS] if command[0] == "serve" else command

    def rank(self, part: str, which: str) -> psutil.Process | None:
        """The process of a worker's leader or follower; None: not yet there."""
        for process in self.parts[part].tree()[1:]:
            with contextlib.suppress(psutil.Error):
                if MODULES[which] in process.cmdline():
                    return process
        return None

    def log(self, part: str) -> str:
        return self.parts[part].log.read_text(errors="replace")

    def is_in_a_step(self, part: str) -> bool:
        """Whether its scheduler's loop answers nothing: it waits for the follower."""
        try:
            httpx.get(f"{self.parts[part].url}/check", timeout=1.0)
        except httpx.TimeoutException:
            return True
        return False
