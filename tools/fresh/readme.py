"""What README tells a new user to type. Read from its text, so that the check follows it."""

import re

PATTERNS = {
    "packages": r"Debian: `(apt-get install [^`]+)`",  # what must be there before the two commands
    "run": r"^(make run) ",
    "test": r"^(make test) ",
    "chat": r"^(make chat) ",
    "question": r"```\n> ([^\n]+)\n",  # to the model in the terminal
    "pasted": r"```\n(curl [^`]+)\n```",  # the request to paste, of one or more lines
    "answer": r"The answer is `(\w+)`",  # to that request
    "by hand": r"```\n((?:\.venv/bin/tandem [^\n]+ &\n){3})```",  # a prefill worker, a decode worker and a router
    "python": r"```python\n([^`]+)```",  # a program, which .venv/bin/python runs
    "printed": r"^ *(curl -s .*\\\n.*)$",  # the request to paste in what `make run` prints
}


class ReadmeError(Exception):
    """README no longer says what the check looks for."""


def find(what: str, text: str) -> str:
    """`what`: of PATTERNS."""
    found = re.search(PATTERNS[what], text, re.MULTILINE)
    if not found:
        raise ReadmeError(f"nothing matches {PATTERNS[what]!r}")
    return found[1]


def by_hand(text: str) -> list[str]:
    """The commands that start a cluster by hand, without the `&` at their ends."""
    return [line.removesuffix(" &") for line in find("by hand", text).splitlines()]
