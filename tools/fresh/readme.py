"""What README tells a new user to type. Read from its text, so that the check follows it."""

import re


class ReadmeError(Exception):
    """README no longer says what the check looks for."""


def packages_line(text: str) -> str:
    """The line that installs what must be there before the two commands."""
    return _find(r"Debian: `(apt-get install [^`]+)`", text)


def pasted_line(text: str) -> str:
    """The request to paste, of one or more lines."""
    return _find(r"```\n(curl [^`]+)\n```", text)


def answer(text: str) -> str:
    """What that request is answered with."""
    return _find(r"The answer is `(\w+)`", text)


def two_commands(text: str) -> tuple[str, str]:
    """(run, test)."""
    return _find(r"^(make run) ", text), _find(r"^(make test) ", text)


def chat_command(text: str) -> str:
    return _find(r"^(make chat) ", text)


def question(text: str) -> str:
    """What README asks the model in the terminal."""
    return _find(r"```\n> ([^\n]+)\n", text)


def by_hand(text: str) -> list[str]:
    """The commands that start a prefill worker, a decode worker and a router, without the `&` at their ends."""
    block = _find(r"```\n((?:\.venv/bin/tandem [^\n]+ &\n){3})```", text)
    return [line.removesuffix(" &") for line in block.splitlines()]


def printed_line(output: str) -> str:
    """The request that `make run` prints to paste."""
    return _find(r"^ *(curl -s .*\\\n.*)$", output)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if not found:
        raise ReadmeError(f"nothing matches {pattern!r}")
    return found[1]
