"""Without a terminal: standard input is one message, standard output receives its answer."""

import sys
from contextlib import aclosing

from deploy.chat.client import ChatClient, ChatFailed
from deploy.chat.conversation import ChatHistory, printable


async def answer_once(client: ChatClient, conversation: ChatHistory) -> int:
    """Return the exit status: 1 if no whole answer came."""
    question = sys.stdin.read().strip()
    if not question:
        print("tandem chat: error: standard input holds no message", file=sys.stderr)
        return 1
    shown = printable if sys.stdout.isatty() else str
    answer = client.begin()
    try:
        async with aclosing(client.pieces(conversation.with_question(question), answer)) as pieces:
            async for piece in pieces:
                if not piece.is_thought:
                    print(shown(piece.text), end="", flush=True)
    except ChatFailed as error:
        print(f"\ntandem chat: error: {error}", file=sys.stderr)
        return 1
    print()
    return 0
