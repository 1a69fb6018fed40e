"""Chat at a terminal.

In raw mode Ctrl-C is a key, not a signal to parents such as `make`. Keys typed during an answer
wait.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from deploy.chat.client import HELP, Answer, ChatClient, ChatCommand, ChatFailed, ChatHistory, command_of, printable

PROMPT, CONTINUED = "> ", "  "
DIM, RED, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"


class Terminal:
    def __init__(self, client: ChatClient, conversation: ChatHistory) -> None:
        self._client = client
        self._conversation = conversation
        self._lines: PromptSession[str] = PromptSession(
            PROMPT, multiline=True, prompt_continuation=CONTINUED, key_bindings=_keys(), reserve_space_for_menu=0
        )
        self._in: Input = self._lines.app.input
        self._out: Output = self._lines.app.output

    async def talk(self) -> None:
        self._note(f"{self._client.model} at {self._client.url}. /help shows the commands, Ctrl-D ends.\n")
        with self._in.raw_mode():  # also between two lines
            while (line := await self._line()) is not None:
                command = command_of(line)
                if command is ChatCommand.EXIT:
                    return
                if command is not None:
                    self._obey(command)
                elif line:
                    await self._answer(line)

    async def _line(self) -> str | None:
        while True:
            try:
                return (await self._lines.prompt_async()).strip()
            except KeyboardInterrupt:
                self._note("Ctrl-D or /exit ends the chat")
            except EOFError:
                return None

    def _obey(self, command: ChatCommand | str) -> None:
        if command is ChatCommand.NEW:
            self._conversation.forget()
            self._note("a new conversation")
        elif command is ChatCommand.HELP:
            self._note(HELP)
        else:
            self._note(str(command), RED)

    async def _answer(self, question: str) -> None:
        answer = self._client.begin()
        show = asyncio.create_task(self._show(self._conversation.with_question(question), answer))
        with _keys_of(self._in, on_stop=show.cancel):
            ends = await _end_of(show)
            self._conversation.add(question, answer.text)
            if ends:
                self._note(ends if answer.text else f"{ends} (Up brings your message back)", RED)
            if answer.first_s is not None:
                words = [*answer.figures(), await self._client.workers_of(answer)]
                self._note(" · ".join(word for word in words if word))
            self._note("")

    async def _show(self, messages: list[dict[str, str]], answer: Answer) -> None:
        thinking, begun = False, False
        try:
            async with aclosing(self._client.pieces(messages, answer)) as pieces:
                async for piece in pieces:
                    if piece.is_thought != thinking:
                        thinking = piece.is_thought
                        self._write(_style(DIM) if thinking else _style(PLAIN) + "\n\n")
                    self._write(printable(piece.text))
                    begun = True
        finally:
            self._write((_style(PLAIN) if thinking else "") + ("\n" if begun else ""))

    def _note(self, text: str, style: str = DIM) -> None:
        self._write(f"{_style(style)}{printable(text)}{_style(PLAIN)}\n" if text else "\n")

    def _write(self, text: str) -> None:
        self._out.write_raw(text)
        self._out.flush()


async def _end_of(show: "asyncio.Task[None]") -> str:
    try:
        await show
    except ChatFailed as error:
        return f"error: {error}"
    except asyncio.CancelledError:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise  # this process is ending
        return "stopped"
    return ""


def _style(code: str) -> str:
    return "" if os.environ.get("NO_COLOR") else code


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add(Keys.Enter)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add(Keys.Escape, Keys.Enter)
    @keys.add(Keys.Escape, Keys.ControlJ)  # typed before the editor started
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


@contextmanager
def _keys_of(source: Input, *, on_stop: Callable[[], object]) -> Iterator[None]:
    ahead: list[KeyPress] = []

    def on_ready() -> None:
        for press in source.read_keys():
            if press.key == Keys.ControlC:
                on_stop()
            else:
                ahead.append(press)

    with source.attach(on_ready):
        yield
    store_typeahead(source, ahead)
