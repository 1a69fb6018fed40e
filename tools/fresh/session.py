"""One command as a user has it. Its lines are shown as they come; in a terminal, which redraws them, it can be typed to."""

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence

BEAT_S, LOOK_S = 30, 0.02
ROWS, COLUMNS = 50, 200
WHERE_IS_THE_CURSOR, HERE = "\x1b[6n", b"\x1b[1;1R"  # line editors ask; a terminal answers
_BEGUN = re.compile(r"(?:\x1b[^A-Za-z]*|\r)?\Z")  # a control whose end has not been read
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][0-9A-B]?|\r(?!\n)")


class CheckFailedError(Exception):
    """README did not hold; the message says where."""


class Session:
    """`argv` runs `command`, in a process group of its own as a terminal gives it. `in_terminal`: and with a terminal.

    `raw`: all that it has written, with a terminal's controls.
    """

    def __init__(
        self, argv: Sequence[str], command: str, *, in_terminal: bool = False, env: Mapping[str, str] | None = None
    ) -> None:
        self.command = command
        self.raw = self._text = ""
        self._keyboard: int | None = None
        if in_terminal:
            self._keyboard, follower = pty.openpty()
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            ends, source = (follower, follower), self._keyboard
        else:
            source, follower = os.pipe()
            ends = (subprocess.DEVNULL, follower)
        self.process = subprocess.Popen(
            argv,
            stdin=ends[0],
            stdout=ends[1],
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal if in_terminal else None,
        )
        os.close(follower)
        self._reader = threading.Thread(target=self._read, args=[source], daemon=True)
        self._reader.start()

    def output(self) -> str:
        return self._text

    def type(self, keys: str) -> None:
        assert self._keyboard is not None, "it has no terminal"
        os.write(self._keyboard, keys.encode())

    def wait(self, limit_s: float) -> int:
        self.until(lambda: self.process.poll() is not None and not self._reader.is_alive(), limit_s)
        return self.process.wait()

    def until_said(self, pattern: str, limit_s: float, *, after: int = 0) -> "re.Match[str]":
        """The first match behind `after` characters. Raises CheckFailedError if the command ends before."""
        found: list[re.Match[str] | None] = [None]

        def is_there() -> bool:
            over = not self._reader.is_alive()
            found[0] = re.compile(pattern).search(self._text, after)
            return found[0] is not None or over

        self.until(is_there, limit_s)
        if found[0] is None:
            raise CheckFailedError(f"`{self.command}` ended before it said {pattern!r}")
        return found[0]

    def until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Wait for `done`, with a sign of life now and then. Raises CheckFailedError."""
        begun = beat = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - begun > limit_s:
                self.kill()
                raise CheckFailedError(f"`{self.command}` took more than {limit_s:.0f} s")
            if now - beat > BEAT_S:
                beat = now
                print(f"fresh-check: `{self.command}` runs, {now - begun:.0f} s", flush=True)
            time.sleep(LOOK_S)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and its group at once, if it has not ended."""
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def _read(self, source: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown, rest = 0, ""
        while data := _read_some(source):
            text = decoder.decode(data)
            self.raw += text
            if WHERE_IS_THE_CURSOR in text and self._keyboard is not None:
                os.write(self._keyboard, HERE)
            text = rest + text
            rest = _BEGUN.findall(text)[0]
            self._text += _CONTROLS.sub("", text.removesuffix(rest)).replace("\r\n", "\n")
            lines = self._text[shown:].split("\n")[:-1]
            for line in lines if self._keyboard is None else ():
                shown += len(line) + 1
                print("  |", line, flush=True)
        os.close(source)


def _take_terminal() -> None:
    """In the child: its keys make signals. A job in the background starts its children with some of them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_some(source: int) -> bytes:
    """Empty at the end; that of a terminal is an error."""
    try:
        return os.read(source, 65536)
    except OSError:
        return b""
