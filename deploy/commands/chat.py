"""`tandem chat`: chat with a running server, or with a temporary cluster."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from deploy.chat.client import ChatConfig
from deploy.flags import Parser, add_flags, config_from
from service.extras import require
from service.flags import ConfigError


def run(argv: Sequence[str]) -> int:
    args = build_parser().parse_strict(argv)
    config = config_from(args, ChatConfig)
    up = _cluster_flags(args, config)
    from deploy.openai_api import check_url

    check_url("--url", config.url)
    if sys.stdin.isatty():
        if not sys.stdout.isatty():
            raise ConfigError("standard output is no terminal: pipe the message in, too (echo hello | tandem chat)")
        require("chat")
    if up is None:
        return asyncio.run(_talk(config, config.url))
    from deploy.chat.local_cluster import NotStarted, local_cluster

    try:
        with local_cluster(up) as url:
            return asyncio.run(_talk(config, url))
    except NotStarted as error:
        return error.status


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem chat",
        model=("start", "start a cluster with this model for the chat, as --up MODEL"),
        description="Talk to a model in the terminal. Where standard input is no terminal, it is one message, and the answer goes "
        "to standard output.",
    )
    add_flags(parser, ChatConfig, title="chat")
    parser.add(
        "chat",
        "--up",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="start a cluster for this chat, and end it with the chat; all that follows are flags of `tandem up`",
    )
    return parser


def _cluster_flags(args: argparse.Namespace, config: ChatConfig) -> list[str] | None:
    """The cluster's flags, None without one. Raises ConfigError."""
    model = getattr(args, "start", None)
    if model is None:
        return None if args.up is None else list(args.up)
    if config.url != ChatConfig.url:
        raise ConfigError(
            f"MODEL {model!r}: starts a cluster for this chat, and --url {config.url} is another server; "
            f"give --model {model} to choose a model of that server, or leave --url out"
        )
    return [model, *(args.up or ())]


async def _talk(config: ChatConfig, url: str) -> int:
    from deploy.chat.client import ChatClient, ChatHistory, answer_once, open_session
    from deploy.openai_api import first_model

    async with open_session(config.key) as session:
        model = config.model or await first_model(session, url)
        client = ChatClient(config, session=session, url=url, model=model)
        conversation = ChatHistory(config.system or "")
        if not sys.stdin.isatty():
            return await answer_once(client, conversation)
        from deploy.chat.terminal import Terminal

        await Terminal(client, conversation).talk()
        return 0
