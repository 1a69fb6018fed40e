"""A `tandem` command at a pseudo-terminal: what it shows, and keys for it."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from service.process.start import die_with_parent

DEADLINE_S = 60.0
ROWS, COLUMNS = 50, 200
# Moves of the cursor, colours, modes.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`raw`: all that came; `until` reads on behind what it has found."""

    def __init__(self, process: "subprocess.Popen[bytes]", leader: int) -> None:
        self.process = process
        self.raw = ""
        self._leader = leader
        self._read = 0
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(leader, self._on_output)

    @property
    def _unread(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r", "")[self._read :]

    async def until(self, text: str) -> None:
        """Until it shows `text`, behind what was found before."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while text not in self._unread:
                    await self._news.wait()
                    self._news.clear()
        except TimeoutError:
            raise AssertionError(f"never shown: {text!r}; but {self._unread!r}") from None
        self._read += self._unread.index(text) + len(text)

    async def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    async def ended(self) -> int:
        """The exit status, once it has ended."""
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)

    async def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._leader)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._leader)

    def _on_output(self) -> None:
        try:
            data = os.read(self._leader, 1 << 16)
        except OSError:  # EIO: all that had it open have ended
            asyncio.get_running_loop().remove_reader(self._leader)
            data = b""
        self.raw += data.decode(errors="replace")
        self._news.set()


@asynccontextmanager
async def terminal(*argv: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Terminal]:
    """`tandem argv` as the leader of a session whose terminal this is."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    dies = die_with_parent()

    def prepare() -> None:
        dies()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background starts its children with it ignored
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", *argv],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare,
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})},
    )
    os.close(follower)
    at = Terminal(process, leader)
    try:
        yield at
    finally:
        await at.end()
