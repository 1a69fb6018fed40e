"""Chat without a terminal: stdin is one message, stdout gets the answer."""

import os
import sys
from contextlib import aclosing

from deploy.chat.client import ChatClient, ChatFailed
from deploy.chat.conversation import ChatHistory, printable


async def answer_once(client: ChatClient, conversation: ChatHistory) -> int:
    """Return the exit status, 1 without a whole answer."""
    question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not question:
        print("tandem chat: error: standard input holds no message", file=sys.stderr)
        return 1
    try:
        await _print_answer(client, conversation, question)
    except ChatFailed as error:
        print(f"\ntandem chat: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest at the final flush
        return 1
    return 0


async def _print_answer(client: ChatClient, conversation: ChatHistory, question: str) -> None:
    shown = printable if sys.stdout.isatty() else str
    async with aclosing(client.pieces(conversation.with_question(question), client.begin())) as pieces:
        async for piece in pieces:
            if not piece.is_thought:
                print(shown(piece.text), end="", flush=True)
    print(flush=True)
