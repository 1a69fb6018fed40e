"""A `tandem` command at a pseudo-terminal: what it shows, and keys for it."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tools.fresh.session import CheckFailedError, Session

DEADLINE_S = 60.0
OF_TERMINALS = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # variables


class Terminal:
    """The session of a command; `until` reads on behind what it has found."""

    def __init__(self, session: Session) -> None:
        self._session, self.process = session, session.process
        self._read = 0

    @property
    def raw(self) -> str:
        """All that came."""
        return self._session.raw

    async def until(self, text: str) -> None:
        """Until it shows `text`, behind what was found before."""
        pattern = re.escape(text)
        try:
            found = await asyncio.to_thread(self._session.until_said, pattern, DEADLINE_S, after=self._read)
        except CheckFailedError as error:
            raise AssertionError(f"never shown: {text!r}; but {self._session.output()[self._read :]!r}") from error
        self._read = found.end()

    async def type(self, keys: str) -> None:
        self._session.type(keys)

    async def ended(self) -> int:
        """The exit status, once it has ended."""
        return await asyncio.to_thread(self._session.wait, DEADLINE_S)


@asynccontextmanager
async def terminal(*argv: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Terminal]:
    """`tandem argv` as the leader of a session whose terminal this is."""
    command = [sys.executable, "-m", "deploy", *argv]
    session = Session(command, "tandem", in_terminal=True, env={**os.environ, **OF_TERMINALS, **(env or {})})
    try:
        yield Terminal(session)
    finally:
        session.kill()
