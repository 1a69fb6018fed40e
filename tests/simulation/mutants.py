"""Planted bugs: each a replacement in one production file. The simulator must catch every one within its fixed seeds.

A mutant is applied to a copy of the sources; a process of its own plays the fixed seeds there until one fails.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = (
    "engine",
    "disagg",
    "router",
    "bootstrap_server",
    "transfer_backends",
    "service",
    "tests/core",
    "tests/simulation",
)
CAUGHT = 1  # exit status of a run that found something
TIMEOUT_S = 280.0


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "skip the quarantine",
        "transfer_backends/decode_rooms.py",
        "return self.machine.state(key) in FINAL and not self._rooms[key].exposed",
        "return self.machine.state(key) in FINAL",
    ),
    Mutant(
        "drop the abort acknowledgement",
        "transfer_backends/prefill_rooms.py",
        "if rec.undrained and rec.quiet and peer is not None:",
        "if rec.undrained and rec.quiet and peer is not None and rec.num_ops < 0:",
    ),
    Mutant(
        "acknowledge an abort while writes are in flight",
        "transfer_backends/prefill_rooms.py",
        "        if rec.quiet:\n            rec.undrained = False",
        "        if True:\n            rec.undrained = False",
    ),
    Mutant(
        "acknowledge after a failed write without a fence",
        "transfer_backends/prefill_sending.py",
        "return self.num_ops == 0 and not self.dirty",
        "return self.num_ops == 0",
    ),
    Mutant(
        "give source pages back while they are read",
        "transfer_backends/prefill_rooms.py",
        "return self.machine.state(key) in FINAL and self._rooms[key].quiet",
        "return self.machine.state(key) in FINAL",
    ),
    Mutant(
        "take a lost connection for the end of all writes",
        "transfer_backends/decode_rooms.py",
        "        if session.phase is Phase.LOST and not any(rec.exposed for rec in rooms):",
        "        for rec in rooms:\n            self._expose(rec, False)\n"
        "        if session.phase is Phase.LOST and not any(rec.exposed for rec in rooms):",
    ),
    Mutant(
        "do not wait for a dead writer's last bytes",
        "transfer_backends/decode_sessions.py",
        "session.settled_at_s = self._ran.at(now_s) + self._settle_s",
        "session.settled_at_s = self._ran.at(now_s)",
    ),
    Mutant(
        "accept a registration for an earlier life",
        "transfer_backends/prefill_peers.py",
        'if message.dst not in ("", self.incarnation):',
        'if message.dst == "nobody":',
    ),
    Mutant(
        "never fence",
        "transfer_backends/prefill_peers.py",
        "if peer.num_ops == 0 and peer.phase is Phase.FENCING:",
        "if peer.num_ops < 0 and peer.phase is Phase.FENCING:",
    ),
    Mutant(
        "say Success before the last write is done",
        "transfer_backends/prefill_rooms.py",
        "if rec.all_queued and rec.num_ops == 0 and not rec.posts and not rec.chunks:",
        "if rec.all_queued and not rec.posts and not rec.chunks:",
    ),
    Mutant(
        "let a layer leave before it is written",
        "transfer_backends/prefill_sending.py",
        "sum(group.end_layer <= progress.layers for",
        "sum(group.end_layer <= progress.layers + 1 for",
    ),
    Mutant(
        "begin a second try behind the layers that left in the first",
        "transfer_backends/prefill_sending.py",
        "        self.posts.clear()\n        self.left_groups = 0",
        "        self.posts.clear()",
    ),
    Mutant(
        "send what decode has cached, too",
        "transfer_backends/prefill_sending.py",
        "src = chunk.src[max(0, rec.offer.skip_pages - chunk.start) :]",
        "src = chunk.src",
    ),
    Mutant(
        "start to decode while the transfer runs",
        "disagg/decode_role.py",
        "elif entry.stage is Stage.TRANSFER and state is KVPoll.Success:",
        "elif entry.stage is Stage.TRANSFER and state in (KVPoll.Transferring, KVPoll.Success):",
    ),
    Mutant(
        "forget a metadata row",
        "disagg/prefill_role.py",
        "        if entry.row is not None:\n            self._metadata.free(entry.row)",
        "        if entry.row is not None and entry.room % 4:\n            self._metadata.free(entry.row)",
    ),
    Mutant(
        "hand pages over before they are computed",
        "disagg/prefill_role.py",
        "whole = entry.request.computed_len // self._scheduler.memory.allocator.page_size",
        "whole = entry.request.launched_len // self._scheduler.memory.allocator.page_size",
    ),
    Mutant(
        "release pages twice",
        "engine/core/memory.py",
        "        self.allocator.free(request.own_pages())\n",
        "        self.allocator.free(request.own_pages())\n        self.allocator.free(request.own_pages())\n",
    ),
    Mutant(
        "give memory back while a step is in flight",
        "engine/core/stages.py",
        "settled = [r for r in self.draining if r.inflight == 0]\n"
        "        self.draining = [r for r in self.draining if r.inflight > 0]",
        "settled, self.draining = self.draining, []\n        for r in settled:\n            r.inflight = 0",
    ),
    Mutant(
        "share a page that is not whole",
        "engine/core/memory.py",
        "whole = min(request.computed_len, request.num_tokens) // self.allocator.page_size",
        "whole = -(-min(request.computed_len, request.num_tokens) // self.allocator.page_size)",
    ),
    Mutant(
        "reuse a room",
        "router/requests/rooms.py",
        "        while room == 0 or room in self._live:\n            room = self._draw(ROOM_BITS)",
        "        while room == 0:\n            room = self._draw(2)",
    ),
    Mutant(
        "keep the lease of an ended leg",
        "router/requests/attempt.py",
        "        launcher.table.release(self._leases[-1])\n",
        "",
    ),
    Mutant(
        "ignore page indices that come before the request",
        "transfer_backends/prefill_rooms.py",
        "        if offer is not None:\n            self._accept(rec, offer)\n        elif",
        "        if",
    ),
    Mutant(
        "look a room up once and never again",
        "transfer_backends/decode_rooms.py",
        "if rec.retry_at_s is not None and rec.retry_at_s <= now_s < rec.deadline_s:",
        "if rec.retry_at_s is not None and rec.retry_at_s < 0:",
    ),
    Mutant(
        "do not tell decode that a transfer has failed",
        "transfer_backends/prefill_rooms.py",
        "            self._tell(rec, KVPoll.Failed)\n            self._tell_drained(rec)",
        "            self._tell_drained(rec)",
    ),
    Mutant(
        "do not tell prefill of an abort",
        "transfer_backends/decode_rooms.py",
        '            self._say_abort(session, rec.key, rec.reason or "")\n        elif session.phase',
        "            pass\n        elif session.phase",
    ),
    Mutant(
        "do not verify the checksum",
        "disagg/decode_role.py",
        "                verify(first, entry.request.pages[entry.request.shared_pages :], self._checksum)\n",
        "",
    ),
    Mutant(
        "end without leaving the bootstrap server",
        "bootstrap_server/client.py",
        "        if self.registered.is_set():\n            incarnation",
        "        if self._shared is None:\n            incarnation",
    ),
    Mutant(
        "take requests while draining",
        "engine/frontend/draining.py",
        '    client.close(draining("the server is draining: it takes no new requests"))\n',
        "",
    ),
    Mutant(
        "do not hand back what has not ended when a worker ends",
        "engine/frontend/draining.py",
        "    client.fail_all(",
        "    str(",
    ),
    Mutant(
        "do not hand back what has not ended when the router ends",
        "router/requests/draining.py",
        "            request.hand_back()\n",
        "            pass\n",
    ),
    Mutant(
        "take a request that comes too late for its deadline",
        "engine/frontend/client/engine_client.py",
        "if wait_s is not None and wait_s > timeout_s:",
        "if wait_s is not None and wait_s > 1e9 * timeout_s:",
    ),
    Mutant(
        "give a retry the whole deadline again",
        "router/requests/dispatch.py",
        "exchange.call.later(self._parts.clock() - exchange.started_s)",
        "exchange.call.later(0.0)",
    ),
    Mutant(
        "let the loser of a hedge run on",
        "router/requests/contest.py",
        "                attempt.end(None if winner",
        "                winner or attempt.end(None if winner",
    ),
    Mutant(
        "find prefixes of the weights before",
        "engine/loop/control.py",
        "        self._scheduler.forget_prefixes()\n",
        "",
    ),
    Mutant(
        "take other weights while KV is in use",
        "engine/loop/control.py",
        "        if self._scheduler.holds_no_kv:\n            self._take",
        "        if True:\n            self._take",
    ),
    Mutant(
        "refuse for load without a word when to come again",
        "engine/frontend/errors.py",
        "retry_after_s = 1 if finish.status == 503 else None",
        "retry_after_s = None",
    ),
    Mutant(
        "count the writes of an older try",
        "transfer_backends/prefill_rooms.py",
        "        if post.retry != rec.retry:\n",
        "        if post.retry > rec.retry:\n",
    ),
    Mutant(
        "let a request outlive its deadline",
        "engine/loop/loop.py",
        "in self._deadlines.due(now_s):",
        "in ():",
    ),
)


def copy_with(mutant: Mutant, folder: Path) -> None:
    """The sources in `folder`, with the bug in them. A ValueError when the source has moved on."""
    for part in COPIED:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "checkpoint", "*.so"))
    (folder / "tests" / "__init__.py").touch()
    target = folder / mutant.path
    text = target.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"mutant {mutant.name!r}: {mutant.path} has its text {text.count(mutant.old)} times, not once")
    target.write_text(text.replace(mutant.old, mutant.new))


def is_caught(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """(caught, what the run said in its last line)."""
    copy_with(mutant, folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.simulation", "--fixed", "--brief"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    said = done.stdout.strip().splitlines()
    if done.returncode not in (0, CAUGHT) or not said:
        raise RuntimeError(f"mutant {mutant.name!r}: the run ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.returncode == CAUGHT, said[-1]
