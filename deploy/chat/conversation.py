"""The conversation, and commands in input lines. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

Message = dict[str, str]

_COMMAND = re.compile(r"/[a-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ChatCommand(Enum):
    NEW = "/new"
    EXIT = "/exit"
    HELP = "/help"


HELP = """\
/new     forget the conversation
/exit    end (Ctrl-D, too)
/help    show this
Enter sends; Alt-Enter begins a line; Up brings back what you wrote.
Ctrl-C stops an answer. What has come stays in the conversation."""


@dataclass
class ChatHistory:
    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def with_question(self, question: str) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Append a question with its (partial) answer, if any."""
        if answer:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def forget(self) -> None:
        self.messages.clear()


def command_of(line: str) -> ChatCommand | str | None:
    """Return a line's command, an error, or None for a message."""
    words = line.split()
    if not words or not _COMMAND.fullmatch(words[0]):
        return None
    known: Sequence[str] = [command.value for command in ChatCommand]
    if words[0] not in known:
        return f"there is no {words[0]}; commands are {', '.join(known)}"
    return ChatCommand(words[0]) if len(words) == 1 else f"{words[0]} takes nothing after it"


def printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))
